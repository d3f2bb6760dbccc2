"""CartPole with other physics, to start from a policy that was trained with the usual ones.

apex train --preset cartpole --name usual
apex train --preset cartpole --env examples.physics:make_cartpole --env-arg gravity=15 --init-from runs/usual
"""

import gymnasium


def make_cartpole(gravity=9.8, pole_mass=0.1, half_length=0.5, render_mode=None):
    """Returns CartPole-v1 with these physics (m/s², kg, m); the defaults are the usual ones."""
    env = gymnasium.make("CartPole-v1", render_mode=render_mode)
    cart = env.unwrapped
    cart.gravity, cart.masspole, cart.length = gravity, pole_mass, half_length
    cart.total_mass, cart.polemass_length = cart.masscart + pole_mass, pole_mass * half_length
    return env
