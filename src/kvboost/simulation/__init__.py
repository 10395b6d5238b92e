"""Replays what a cache was asked for, over policies and budgets, without a model.

trace.py      requests as named pieces
readers.py    public block traces, request logs
tokens.py     texts to pieces: blocks of a prefix cache, chunks of ours
policies.py   LRU, LFU, S3-FIFO, GDSF, and the policy of `kvboost.store`
belady.py     what no policy can exceed
replay.py     hit tokens of one policy; the grid
breaks.py     which text ends common prefixes
report.py     a page and a plot
"""
