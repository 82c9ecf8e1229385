"""The same methods on real clients: what touches a client's data runs on its node, Flower carries the messages.

`remote` is the way to the nodes that a federation trains through, `node` what a node does, `flower` the only file that
knows Flower's messages.
"""
