"""`moefuse bench`: one MoE layer, or a model of a few layers, against everything else that runs here.

shapes.py says what is measured, contestants.py who takes part, limits.py what the machine could do at best, run.py
measures layers, model.py models, show.py draws tables and plots, command.py is the command.
"""
