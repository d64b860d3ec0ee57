"""Exported folders in an inference engine, beside dmx's own emulation: see `__main__`."""
