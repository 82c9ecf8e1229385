"""Language models: low-rank adapters, models of transformers, and prompts.

Methods join adapters of clients; prompts have answers. Files that are called as packages of `fl` add to these;
`adapters` and `joining` are what they share.
"""
