"""The presets: their values, and which preset an environment gets."""

from dataclasses import replace

import pytest

from apex.config import ActorConfig, Config, EnvironmentConfig, dump_toml, flatten, load_toml
from apex.config.presets import (
    ATARI,
    CARTPOLE,
    CONTROL,
    CONTROL_GRID,
    CONTROL_IMAGE,
    DEFAULT,
    GRID,
    IMAGE,
    LUNARLANDER,
    LUNARLANDER_CONTINUOUS,
    NARROW,
    PENDULUM,
    PONG,
    PRESETS,
    VECTOR,
    preset_for,
)


def test_the_presets_are_the_documented_ones():
    assert set(PRESETS) == {"cartpole", "lunarlander", "pong", "atari", "btr", "r2d2", "paper", "dpg", "control"}
    assert DEFAULT == "pong"


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_survives_a_file(name, tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(dump_toml(PRESETS[name].config, Config()))
    assert load_toml(path) == PRESETS[name].config


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_has_a_summary_of_one_line(name):
    summary = PRESETS[name].summary
    assert "\n" not in summary
    assert 10 < len(summary) < 60


def test_the_paper_preset_is_the_default_with_360_actors():
    assert PRESETS["paper"].config == replace(Config(), actor=ActorConfig(num_actors=360))


OWN_IMAGES_ON_GPU = replace(ATARI, environment=EnvironmentConfig(clip_rewards=False))


@pytest.mark.parametrize(
    ("setting", "value"),  # Horgan et al. 2018, section 4.1 and appendix C, typed a second time.
    [
        ("actor.num_actors", 360),
        ("actor.epsilon_base", 0.4),
        ("actor.epsilon_exponent", 7.0),
        ("actor.n_step", 3),
        ("actor.gamma", 0.99),
        ("actor.segment_length", 50),
        ("actor.parameters_period", 100),
        ("replay.capacity", 2_000_000),
        ("replay.min_size_to_sample", 50_000),
        ("replay.priority_exponent", 0.6),
        ("replay.samples_per_insert", 0.0),
        ("learner.batch_size", 512),
        ("learner.optimizer", "rmsprop"),
        ("learner.learning_rate", 0.00025 / 4),
        ("learner.optimizer_epsilon", 1.5e-7),
        ("learner.rmsprop_decay", 0.95),
        ("learner.max_gradient_norm", 40.0),
        ("learner.loss", "squared"),
        ("learner.importance_sampling_exponent", 0.4),
        ("learner.target_period", 2_500),
        ("network.width", 1.0),
        ("network.hidden", 512),
        ("network.dueling", True),
        ("environment.frame_skip", 4),
        ("environment.clip_rewards", True),
    ],
)
def test_the_paper_preset_has_the_values_of_the_paper(setting, value):
    assert flatten(PRESETS["paper"].config)[setting] == value
    environment = PRESETS["paper"].config.environment
    assert (environment.atari_size, environment.atari_stack) == (84, 4)


def test_grids_have_one_step_returns_and_a_low_rate():
    """See ADR 53."""
    assert (GRID.actor.n_step, GRID.learner.learning_rate, GRID.learner.target_period) == (1, 1e-4, 100)
    assert replace(GRID.actor, n_step=3) == VECTOR.actor
    assert GRID.network.width == 0.5


def test_the_narrow_preset_differs_from_pong_in_few_settings():
    learner = replace(PONG.learner, learning_rate_until_limit=True, learning_rate_updates=200_000, random_shift=4)
    actor = replace(PONG.actor, n_step=5)
    changed = replace(PONG, actor=actor, learner=learner, network=NARROW.network, evaluator=NARROW.evaluator)
    assert changed == NARROW
    assert (PONG.learner.random_shift, PONG.actor.n_step) == (0, 3)
    assert NARROW.network.width == 0.5
    assert (NARROW.evaluator.episodes, PONG.evaluator.episodes, PONG.evaluator.confirm_episodes) == (10, 5, 100)
    assert (PONG.learner.learning_rate, PONG.learner.optimizer_epsilon) == (6e-4, 1e-5)


def test_fire_follows_a_lost_life_except_in_the_paper_preset():
    assert ATARI.environment.fire_after_life_loss
    assert PONG.environment.fire_after_life_loss
    assert not PRESETS["paper"].config.environment.fire_after_life_loss


def test_pong_leaves_sizes_to_the_machine():
    assert (PONG.actor.num_actors, PONG.learner.batch_size, PONG.learner.bfloat16) == (0, 0, "auto")
    assert (ATARI.actor.num_actors, ATARI.learner.batch_size, ATARI.learner.bfloat16) == (0, 512, "auto")


def test_pong_is_narrow_and_cartpole_ends_when_solved():
    assert PONG.network.width == 0.25
    assert (CARTPOLE.run.stop_score, CARTPOLE.evaluator.confirm_episodes) == (475.0, 100)
    assert LUNARLANDER.run.stop_score == 200.0


@pytest.mark.parametrize(
    ("kind", "environment_id", "on_gpu", "without"),
    [
        ("atari", "ALE/Pong-v5", PONG, PONG),
        ("atari", "PongNoFrameskip-v4", PONG, PONG),
        ("atari", "pong", PONG, PONG),
        ("atari", "ALE/Breakout-v5", ATARI, NARROW),
        ("image", "CarRacing-v3", OWN_IMAGES_ON_GPU, IMAGE),
        ("image", "my.games:pong", OWN_IMAGES_ON_GPU, IMAGE),
        ("image", "Pong3D-v0", OWN_IMAGES_ON_GPU, IMAGE),  # not the Atari game
        ("vector", "CartPole-v1", CARTPOLE, CARTPOLE),
        ("vector", "LunarLander-v3", LUNARLANDER, LUNARLANDER),
        ("vector", "LunarLander-v2", LUNARLANDER, LUNARLANDER),
        ("continuous", "Pendulum-v1", PENDULUM, PENDULUM),
        ("continuous", "LunarLanderContinuous-v3", LUNARLANDER_CONTINUOUS, LUNARLANDER_CONTINUOUS),
        ("continuous", "HalfCheetah-v5", CONTROL, CONTROL),
        ("continuous-image", "CarRacing-v3", CONTROL_IMAGE, CONTROL_IMAGE),
        ("continuous-grid", "my.robots:Arm", CONTROL_GRID, CONTROL_GRID),
        ("grid", "MiniGrid-Empty-8x8-v0", GRID, GRID),
    ],
)
def test_an_environment_gets_the_preset_of_its_kind(kind, environment_id, on_gpu, without):
    for expected, gpu in ((on_gpu, True), (without, False)):
        config = preset_for(kind, environment_id, gpu=lambda gpu=gpu: gpu)
        assert config == replace(expected, environment=replace(expected.environment, id=environment_id))


@pytest.mark.parametrize("environment_id", ["Acrobot-v1", "CartPole-v0", "my.games:CartPole", "LunarLanderMoon-v0"])
def test_other_vector_environments_get_the_vector_preset(environment_id):
    config = preset_for("vector", environment_id, gpu=lambda: pytest.fail("not asked"))
    assert config == replace(VECTOR, environment=EnvironmentConfig(id=environment_id, clip_rewards=False))
    assert config.learner.learning_rate < CARTPOLE.learner.learning_rate
    assert config.run.stop_score is None


@pytest.mark.parametrize(
    ("setting", "value"),  # Horgan et al. 2018, appendix D, typed a second time.
    [
        ("actor.n_step", 5),
        ("actor.num_actors", 64),
        ("replay.capacity", 1_000_000),
        ("replay.priority_exponent", 0.6),
        ("learner.batch_size", 256),
        ("learner.learning_rate", 1e-4),
        ("learner.optimizer", "adam"),
        ("learner.target_period", 100),
        ("dpg.policy_units", 300),
        ("dpg.policy_units_2", 200),
        ("dpg.critic_units", 400),
        ("dpg.critic_units_2", 300),
        ("dpg.first_activation", "tanh"),
        ("dpg.num_critics", 1),
        ("dpg.policy_period", 1),
        ("dpg.policy_learning_rate_share", 1.0),
        ("dpg.action_gradient_clip", 1.0),
        ("dpg.noise", 0.3),
        ("dpg.noise_ladder", 1.0),
        ("dpg.target_noise", 0.0),
        ("dpg.normalize_observations", False),
        ("environment.reward_scale", 1.0),
        ("environment.clip_rewards", False),
    ],
)
def test_the_dpg_preset_has_the_values_of_the_paper(setting, value):
    assert flatten(PRESETS["dpg"].config)[setting] == value
