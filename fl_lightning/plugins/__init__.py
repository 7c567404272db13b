"""A user's own algorithms, data sets and models: named in the configuration as FILE.py:FUNCTION, loaded on demand.

Importing this package loads neither torch nor any user's file.
"""
