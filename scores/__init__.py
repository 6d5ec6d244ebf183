"""scores: what stands behind eval.py and plot.py. Enter only to change the form of an answer file or a table.

    answers.py    files of answers: the settings they depend on, one line per response
    tables.py     answers -> pass@k, its standard error, the length sweep, the comparison of two models, and their text
"""
