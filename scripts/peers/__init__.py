"""Other tools' searches on the same model, tokens, candidate formats, units and budget, measured by one evaluator.

protocol.py    what a runner is asked for and answers, as files: it runs in an environment of its own
workers/       one runner a tool; the only files that import a peer
tools.py       which tools there are, what each can do, and where its environment is
answers.py     an answer as an `Assignment`, or weights that are values of its formats
texts.py       the texts and their tokens, before a model is loaded
bench.py       the model, and rows of our evaluator
__main__.py    the command; see there
"""
