"""A cluster of replicas, simulated from measured costs: how many, how much RAM, disk and remote bandwidth a load wants."""
