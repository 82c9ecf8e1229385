"""What is computed of finished runs: results, costs, clusters of clients, and loss landscapes."""
