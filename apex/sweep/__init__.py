"""`apex sweep` searches settings with Optuna; `apex train --seeds` trains with several seeds."""
