"""`python -m bench fleet`: simulates runs with many actor hosts."""
