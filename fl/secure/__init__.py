"""Secure recombination: the server receives recombined models only.

From FedMR (KDD 2024), appendix B. Clients exchange layers before they upload. In each repeat every client (1) sends a
random part of its pieces, each to one random other client; (2) puts every piece that it receives into the buffer of
that piece; (3) returns, for every piece that it received, one random element of that piece's buffer; (4) has a whole
model again. If the clients are honest, every piece of every model still exists exactly once: a permutation for each
piece.

Each piece is padded to the length of the longest one and sealed by its owner for the server's key of that round, so
that clients cannot read each other's pieces. Every message is locked between its sender and its recipient, so that no
one who carries it, including the server, can read or change it. Lost messages are sent again; messages that are
repeated, tampered with or foreign are ignored; clients that do not answer are left out, and the others begin again from
their trained models. The outcome names all of this. Nothing is opened before everything has arrived, so among honest
clients no piece is lost or doubled, whatever happens on the way.

What it protects, and what it does not:

- Parties are assumed to be honest but curious: they follow the protocol and look at everything that passes by. A client
  that lies can spoil the round (which then ends with an error, if somebody notices: pieces that cannot be opened, that
  belong to another session or place, or that come twice). It can also replace others' pieces by made-up ones unnoticed:
  it sends made-up pieces, correctly sealed, receives real ones for them and drops these. No signature would show it.
- No client colludes with the server. One that tells which sealed pieces it passed on, and to whom, undoes its part.
- The server is trusted with the public keys: it gives the clients each other's keys. A server that hands out its own
  keys instead could sit in between; where that is a worry, get the keys from elsewhere.
- Whoever carries messages sees who writes to whom and when: so how many pieces travel between two clients. They do not
  see which pieces, or which come back: all have one length and a random order.
- Only the order is secret. The server sees every trained piece, and may tell from their values which belong together
  (pieces of one client's model fit each other). It is neither secure aggregation nor differential privacy.
- One repeat leaves some 70 % of the pieces where they were trained; each further repeat leaves about two thirds of the
  excess over 1/K, which is chance: with 10 clients, 50 % after two, 37 % after three, 18 % after six. A whole model
  stays with its client with about that share to the power of the number of pieces: for 5 pieces 18 % after one repeat,
  3 % after two and 0.5 % after three; for 10 pieces 2.5 %, 0.2 %, below 0.1 %. Use three repeats or more, and layers as
  pieces.
- After a client is lost, the others exchange again, and whoever carries messages sees how many pieces travel both
  times.

What it costs, and changes:

- A client uploads its number of pieces times the length of the longest: VGG-16 for CIFAR-10 in layers is 29 pieces of
  67 MB, 1.95 GB, 14.5 times the model. What it sends to other clients comes on top.
- The server does not know the trained models, so the metrics of clients' models in metrics.csv (accuracy, cosine) are
  computed from the recombined models.
- A simulation makes the clients' choices by the run's seed, so that it can be repeated: whoever knows the seed knows
  the order. Keys, sessions and tags are new in every round and always random.
"""

from fl.secure.boxes import SERVER, require
from fl.secure.client import Client, Envelope
from fl.secure.exchange import Outcome, Server, exchange

__all__ = ["SERVER", "Client", "Envelope", "Outcome", "Server", "exchange", "require"]
