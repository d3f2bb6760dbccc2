"""The built-in algorithms. Nothing else names them; the first one of each kind of actions is the default."""

from typing import NamedTuple


class BuiltIn(NamedTuple):
    """An algorithm of this package."""

    path: str  # module:class, which is called with a configuration and a schema
    continuous: bool  # whether it learns continuous actions
    recurrent: bool = False  # whether it learns from sequences, with a state that its agents keep


ALGORITHMS = {
    "dqn": BuiltIn("apex.dqn.algorithm:DqnAlgorithm", continuous=False),
    "iqn": BuiltIn("apex.iqn.algorithm:IqnAlgorithm", continuous=False),
    "r2d2": BuiltIn("apex.r2d2.algorithm:R2d2Algorithm", continuous=False, recurrent=True),
    "dpg": BuiltIn("apex.dpg.algorithm:DpgAlgorithm", continuous=True),
    "sac": BuiltIn("apex.sac.algorithm:SacAlgorithm", continuous=True),
}
OWN_SETTINGS = ("iqn", "r2d2", "sac")  # branches of settings that only the algorithm with this name reads
