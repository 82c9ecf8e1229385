"""Language models: adapters of low rank and the methods that join them, models of transformers, prompts with answers.

Files that are called as packages of `fl` add to these; `adapters` and `joining` are what they share.
"""
