"""dm_control from pixels: the agent sees only images of a camera, and its actions last several steps.

cd examples
apex train --env pixels:make_swingup --algorithm sac --max-minutes 20
"""

import os

import gymnasium
from gymnasium.wrappers import AddRenderObservation

SIZE = 64  # height and width of the images
REPEAT = 8  # steps of the environment with the same action, as Hafner et al. 2019 have for this task


class RepeatedAction(gymnasium.Wrapper):
    """Repeats each action REPEAT times; the reward is the sum."""

    def step(self, action):
        total = 0.0
        for _ in range(REPEAT):
            observation, reward, terminated, truncated, info = self.env.step(action)
            total += reward
            if terminated or truncated:
                break
        return observation, total, terminated, truncated, info


def make_swingup(render_mode="rgb_array"):
    """Returns cartpole-swingup with images as observations: uint8[SIZE, SIZE, 3]. Its best score is below 1,000."""
    os.environ.setdefault("MUJOCO_GL", "egl")  # draws without a screen; dm_control reads it when it is imported
    import shimmy  # noqa: F401  registers the tasks of dm_control

    camera = {"height": SIZE, "width": SIZE, "camera_id": 0}
    task = gymnasium.make("dm_control/cartpole-swingup-v0", render_mode=render_mode, render_kwargs=camera)
    quality = task.unwrapped.physics.model.vis.quality
    quality.shadowsize = quality.offsamples = 0  # Without a GPU, both take most of the time.
    return AddRenderObservation(RepeatedAction(task))
