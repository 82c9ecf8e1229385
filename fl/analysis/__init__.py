"""What is computed of finished runs: results, costs, clusters of clients, loss landscapes, and models' similarity.

`python -m fl.analysis` compares the weights of models of different size (FedFA's appendices 0.B and 0.F).
"""
