"""The same methods on real clients, with Flower: data stay on their nodes.

Flower carries the messages. `remote` is the way to the nodes that a federation trains through, `node` what a node does,
`flower` the only file that knows Flower's messages.
"""
