"""Runners of peers: each runs in the environment of its tool, as `python -m scripts.peers.workers.NAME FOLDER`."""
