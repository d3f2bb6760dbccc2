"""The replay memory of Ape-X: a store of prioritized transitions in shared memory, its frames and its snapshots."""
