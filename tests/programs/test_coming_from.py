# SPDX-License-Identifier: Apache-2.0
"""The pages in docs/coming-from show the programs beside them, and what these print."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docs" / "coming-from"
PAGES = sorted(page for page in FOLDER.glob("*.md") if page.name != "README.md")

FACTS = {
    "from_accelerate": ["weights of the two: equal\nweights of the two: equal\n```"],
    "from_lightning": ["weights of the two: equal\n```"],
    "from_ray_data": ["epochs begun: 1\nrows, each once: True\n```"],
    "from_ray_train": ["weights of the two: equal\n```"],
    "from_raysgd": ["weights of the two: equal\n```"],
    "raysgd_surface": ["names and keywords, each called\n```"],
}
"""What the prose of each page rests on: a refreshed page that lost it needs other prose."""


def _refresh(*arguments):
    return subprocess.run(
        [sys.executable, str(ROOT / "docs" / "refresh.py"), "--check", *map(str, arguments)],
        # A cluster of their own, also where another one runs on this machine.
        env={**os.environ, "RAY_ADDRESS": "local"},
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_pages_show_the_source_as_it_is():
    done = _refresh("--without-running", *PAGES)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_prose_rests_on_what_is_shown(page):
    shown = page.read_text()
    assert f"<!-- run: {page.stem}.py -->" in shown
    assert f"]({page.name})" in (FOLDER / "README.md").read_text()
    assert [fact for fact in FACTS[page.stem] if fact not in shown] == []


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_programs_print_what_the_pages_show(page):
    done = _refresh(page)
    assert done.returncode == 0, done.stdout + done.stderr


RAYSGD = """
    TorchTrainer TFTrainer PyTorchTrainer BaseTorchTrainable TrainingOperator CreatorOperator
    data.Dataset BATCH_SIZE NUM_SAMPLES BATCH_COUNT TimerStat TimerCollection AverageMeter
    AverageMeterCollection find_free_port check_for_failure override USE_FP16 NUM_STEPS
    SCHEDULER_STEP SCHEDULER_STEP_BATCH SCHEDULER_STEP_EPOCH SCHEDULER_STEP_MANUAL
    VALID_SCHEDULER_STEP NCCL_TIMEOUT_S RESIZE_COOLDOWN_S training_operator_cls
    initialization_hook config num_workers num_cpus_per_worker use_gpu backend wrap_ddp
    timeout_s use_fp16 use_tqdm add_dist_sampler scheduler_step_freq use_local num_replicas
    batch_size model_creator optimizer_creator data_creator loss_creator scheduler_creator
    data_loader_args apex_args serialize_data_creation train(num_steps) train(profile)
    train(reduce_results train(max_retries) train(info) train(dataset) validate(num_steps)
    validate(profile) validate(reduce_results validate(info) update_scheduler get_model
    get_local_operator state_dict load_state_dict load_state_dict(blocking save load restore
    shutdown apply_all_workers apply_all_operators as_trainable
    as_trainable(override_tune_step worker_group max_replicas register(models
    register(criterion register(schedulers register(ddp_args register(apex_args
    register_data(train_loader register_data(validation_loader setup train_epoch train_batch
    validate validate_batch device device_ids world_rank local_rank global_step timers
    from_creators from_ptl(train_dataloader
"""
"""The public names of RaySGD 1.3, and the keywords of its calls."""


def test_every_name_of_raysgd_has_a_row():
    shown = (FOLDER / "raysgd_surface.md").read_text().splitlines()
    assert [n for n in RAYSGD.split() if not any(row.startswith(f"  {n}") for row in shown)] == []
    assert [row for row in shown if "WRONG" in row] == []
