"""The built-in algorithms. Nothing else names them; the first one of each kind of actions is the default."""

from typing import NamedTuple


class BuiltIn(NamedTuple):
    """An algorithm of this package."""

    path: str  # module:class, which is called with a configuration and a schema
    continuous: bool  # whether it learns continuous actions


ALGORITHMS = {
    "dqn": BuiltIn("apex.dqn.algorithm:DqnAlgorithm", continuous=False),
    "iqn": BuiltIn("apex.iqn.algorithm:IqnAlgorithm", continuous=False),
    "dpg": BuiltIn("apex.dpg.algorithm:DpgAlgorithm", continuous=True),
    "sac": BuiltIn("apex.sac.algorithm:SacAlgorithm", continuous=True),
}
