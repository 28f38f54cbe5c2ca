"""Our formula beside TRL, verl, OpenRLHF and Liger: the peers' own functions, on the same random batches. `make parity` runs it.

batches → peers (one adapter a framework) → compare (the measurements) → report (parity.json → README.md)
"""
