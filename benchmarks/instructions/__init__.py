"""The regression guard: how many instructions each kernel takes for fixed work, against the accepted counts.

Unlike seconds, these are the same on every machine, so that a small change is seen. `make guard` compares,
`make accept-instructions` writes down what is there now.
"""
