"""Weights of trained models compared: blocks of one model, and models of different size (FedFA, appendices 0.B, 0.F).

`python -m benchmarks.papers.models similarity RUN` and `... scales RUN RUN` are the commands.
"""
