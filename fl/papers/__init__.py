"""The three papers' tables and figures as cells that can be run, their stored runs, and the page that compares them."""
