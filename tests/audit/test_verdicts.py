# SPDX-License-Identifier: Apache-2.0
"""Verdicts on recorded programs of which one thing was changed, and on facts made by hand."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from tests.audit.traces import TRACES, read_trace
from torch.utils.data import DataLoader, DistributedSampler

from lockstep.audit.facts import MOST_INDICES, Loading, Parameter, Step, Term, Track
from lockstep.audit.finding import Place
from lockstep.audit.judgement import judge
from lockstep.audit.ledger import Ledger
from lockstep.audit.prints import Fingerprint
from lockstep.audit.probe.hooking import hook_in
from lockstep.audit.probe.loaders import _replicas, _sampler_name
from lockstep.audit.probe.probe import Probe
from lockstep.audit.rules.data import DATA
from lockstep.audit.rules.mixed import OWN_SCALES
from lockstep.audit.rules.overlap import same_samples
from lockstep.audit.world import World


def _recorded(name):
    return read_trace(TRACES / f"{name}.json.xz")


def _graver(ledgers):
    return [f.code for f in judge(ledgers) if f.severity != "notice"]


def test_losses_that_are_nearly_alike_are_no_shared_loss():
    """Ranks that begin to train a language model all have about the logarithm of its vocabulary."""
    ledgers = _recorded("bugs/f_not_divided")
    for ledger in ledgers:
        for step in ledger.tracks[0].steps:
            step.backwards[0].loss = 10.82 + 0.002 * ledger.rank
    assert _graver(ledgers) == ["LS205"]
    for ledger in ledgers:
        for step in ledger.tracks[0].steps:
            step.backwards[0].loss = 10.82
    assert _graver(ledgers) == []


def test_evaluations_of_modules_of_other_sizes_are_not_compared():
    ledgers = _recorded("bugs/h_statistics")
    assert "LS309" in _graver(ledgers)
    for one in ledgers[0].evaluations:
        one.counts = [count + 1 for count in one.counts]
    assert "LS309" not in _graver(ledgers)
    assert not any(ledger.facts.unseen for ledger in ledgers)


@pytest.mark.parametrize("change", ["not used", "apart from the beginning"])
def test_buffers_that_no_gradient_follows_from_or_that_began_apart_are_not_compared(change):
    ledgers = _recorded("bugs/h_centre_of_own_rows")
    assert _graver(ledgers) == ["LS309"]
    for ledger in ledgers:
        (fact,) = ledger.buffers_used
        if change == "not used":
            fact.used = ["another"]
        else:
            fact.prints[0] = fact.prints[-1]
    assert _graver(ledgers) == []


def test_a_rank_that_has_left_no_step_ends_no_judgement():
    ledgers = _recorded("bugs/f_not_divided")
    ledgers[1].tracks[0].steps.clear()
    assert not any(track.meets_again for track in World(ledgers).tracks)


def _read(indices, sampler="Own", key="data#0", where=(), **said):
    indices = list(map(int, indices))
    of_training = {"training": True, "has_ended": True}
    return Loading(key, list(where), indices, sampler=sampler, **of_training, **said)


def _same_samples(loadings):
    return same_samples(World([]), dict(enumerate(loadings)))


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_draws_with_replacement_share_samples_however_many_ranks_draw(ranks):
    size, numbers = 800, np.random.default_rng(0)

    def told(again):
        return _same_samples(
            _read(
                numbers.choice(size, size // ranks, again),
                "DistributedSamplerWrapper",
                size=size,
                replicas=ranks,
            )
            for _ in range(ranks)
        )

    assert told(again=True) is None
    assert told(again=False).code == "LS503"


def test_of_a_large_dataset_the_first_samples_tell_that_each_rank_reads_all():
    """The probe writes so many indices down, and what no rank read is not known."""
    numbers, size = np.random.default_rng(0), 2 * MOST_INDICES
    read = [numbers.permutation(size)[:MOST_INDICES] for _ in range(2)]
    found = _same_samples(_read(each, "RandomSampler", size=size, dataset=7) for each in read)
    assert found.code == "LS503"
    assert "by none" not in found.message
    assert _same_samples(_read(each[:-1], size=size, dataset=7) for each in read) is None


def test_a_loader_made_anew_over_one_dataset_is_known_by_what_it_holds():
    """Its rows are augmented, and so other ones in each epoch."""
    order = np.random.default_rng(0).permutation(96)
    orders = [order, order, order]

    def told(dataset):
        ledgers = [Ledger(rank=rank, world_size=2, started_group=True) for rank in range(2)]
        for ledger in ledgers:
            ledger.loadings = [
                _read(
                    each[ledger.rank :: 2],
                    "DistributedSampler",
                    key=f"data#{epoch}",
                    size=96,
                    replicas=2,
                    shuffles=True,
                    dataset=dataset,
                    step=10 * epoch,
                )
                for epoch, each in enumerate(orders)
            ]
        return [found.code for found in DATA.judge(World(ledgers))]

    assert told(7) == ["LS504"]
    assert told(None) == []


@pytest.mark.parametrize("ranks", [4, 8])
def test_repeated_augmentation_deals_each_sample_to_several_ranks(ranks):
    size, numbers = 768, np.random.default_rng(0)
    share = size // ranks
    repeated = numbers.permutation(size).repeat(3)
    dealt = [_read(repeated[r::ranks][:share], size=size, replicas=ranks) for r in range(ranks)]
    assert _same_samples(dealt) is None
    own = [_read(numbers.permutation(size)[:share], size=size) for _ in range(ranks)]
    assert _same_samples(own).severity == "warning"
    pairs = [own[rank // 2 * 2] for rank in range(ranks)]
    assert _same_samples(pairs).severity == "warning"


@pytest.mark.parametrize(
    ("name", "codes"), [("healthy/zero1_divided", []), ("bugs/f_scattered_sum", ["LS205"])]
)
def test_masters_of_which_each_rank_has_its_part_get_scattered_gradients(name, codes):
    """They are known as parts where they are gathered; a small copy of them may be, instead."""
    ledgers = _recorded(name)
    for ledger in ledgers:
        for track in ledger.tracks:
            for param in track.parameters:
                param.sharded = False
    assert _graver(ledgers) == codes


@pytest.mark.parametrize(
    ("name", "code"), [("i_frozen_features", "LS302"), ("i_target_on_rank_0", "LS303")]
)
def test_frozen_weights_of_one_norm_differ_by_their_elements(name, code):
    """As orthogonal ones that each rank draws for itself."""
    ledgers = _recorded(f"bugs/{name}")
    assert _graver(ledgers) == [code]
    for ledger in ledgers:
        for step in ledger.tracks[0].steps:
            for module in step.frozen:
                module.prints = replace(module.prints, norms=np.ones(len(module.names)))
    assert _graver(ledgers) == [code]


@pytest.mark.parametrize(
    ("weight", "count_of", "codes"),
    [
        pytest.param(0.02, lambda main: main.count, ["LS203"], id="label smoothing"),
        pytest.param(0.01, lambda main: 64.0, ["LS203"], id="a penalty"),
        pytest.param(1.0, lambda main: 64.0, [], id="another loss"),
        pytest.param(0.5, lambda main: 40.0 - main.count, [], id="of other elements"),
    ],
)
def test_a_loss_of_two_terms_is_judged_by_the_one_that_stands_for_it(weight, count_of, codes):
    ledgers = _recorded("bugs/f_tokens_per_rank")
    for ledger in ledgers:
        for step in ledger.tracks[0].steps:
            (backward,) = step.backwards
            (main,) = backward.terms
            count = count_of(main)
            backward.terms.append(Term("mean", weight / count, count, "sum", may_be_masked=False))
    assert _graver(ledgers) == codes


class Buckets(DistributedSampler):
    def __iter__(self):
        indices = list(super().__iter__())
        return iter([indices[:4], indices[4:]])


def test_a_sampler_that_deals_batches_out_is_a_distributed_one():
    data = list(range(16))
    loader = DataLoader(data, batch_sampler=Buckets(data, num_replicas=2, rank=0))
    assert (_sampler_name(loader), _replicas(loader)) == ("Buckets(DistributedSampler)", 2)
    epochs = [_read([7, 2, 5, 4], _sampler_name(loader), step=2 * epoch) for epoch in range(2)]
    assert _codes_of_rank_0(epochs) == ["LS504"]


def _codes_of_rank_0(loadings):
    ledgers = [Ledger(world_size=2, loadings=loadings), Ledger(rank=1, world_size=2)]
    return [found.code for found in DATA.judge(World(ledgers))]


@pytest.mark.parametrize(
    ("told", "codes"),
    [
        ([{"rows": [[1, 2, 3, 4]]}, {"rows": [[5, 6, 7, 8]]}], []),
        ([{"rows": [[1, 2, 3, 4]]}, {"rows": [[5, 6, 7, 8]]}, {"rows": [[5, 6, 7, 8]]}], ["LS504"]),
        # Augmented samples, whose labels are the same; and masks that are the same in all samples.
        (
            [{"rows": [[1, 2, 3, 4], [9, 8, 7, 6]]}, {"rows": [[5, 6, 7, 8], [9, 8, 7, 6]]}],
            ["LS504"],
        ),
        ([{"rows": [[1, 2, 3, 4], [9, 9, 9, 9]]}, {"rows": [[5, 6, 7, 8], [9, 9, 9, 9]]}], []),
        ([{"contents": [11]}, {"contents": [11]}], ["LS504"]),
        ([{"contents": [11]}, {"contents": [12]}], []),
        ([{"batches": [1, 2, 3, 4]}, {"batches": [1, 2, 3, 4]}], ["LS504"]),
    ],
)
def test_loaders_of_one_line_are_epochs_where_they_read_one_dataset(told, codes):
    """And not the shards of one, each read in the order that its own new sampler begins with."""
    line = [Place("train.py", 7, "main", "")]
    loadings = [
        _read([7, 2, 5, 4], "DistributedSampler", f"data#{number}", line, step=2 * number, **said)
        for number, said in enumerate(told)
    ]
    assert _codes_of_rank_0(loadings) == codes


def _of_two_parameters(dtype="float32"):
    """The ledgers of two ranks, as yet without steps."""
    ledgers = [Ledger(rank=rank, world_size=2, started_group=True) for rank in range(2)]
    for ledger in ledgers:
        held = [Parameter(name, [1], dtype, samples=1) for name in ("body", "head")]
        ledger.tracks = [Track("SGD#0", "SGD", [], held)]
    return ledgers


def _step(track, begun, gradient, left):
    prints = [
        Fingerprint(x.view(np.int64), np.abs(x), x) for x in map(np.array, (begun, gradient, left))
    ]
    track.steps.append(Step(track.count, [], prints[0], prints[1], exit=prints[2]))
    track.count += 1


def _trained_in_rounds(steps, averaged):
    """The ledgers of two ranks that go their own ways, and average a parameter after each round.

    Args:
        steps: by rank, of each round.
        averaged: by round, which of two parameters.
    """
    numbers = np.random.default_rng(0)
    weights = np.ones((2, 2))
    ledgers = _of_two_parameters()
    for place in averaged:
        for rank, ledger in enumerate(ledgers):
            for _ in range(steps[rank]):
                gradient = numbers.normal(size=2)
                _step(ledger.tracks[0], weights[rank], gradient, weights[rank] - gradient)
                weights[rank] -= gradient
        weights[:, place] = weights[:, place].mean()
    return ledgers


@pytest.mark.parametrize("steps", [(3, 3), (3, 5)])
def test_pieces_of_a_model_may_be_averaged_in_turn(steps):
    assert _graver(_trained_in_rounds(steps, averaged=[0, 1, 0, 1, 0])) == []
    assert "LS101" in _graver(_trained_in_rounds(steps, averaged=[0, 0, 0, 0, 0]))


def test_small_weights_that_come_near_one_another_do_not_meet():
    ledgers = _of_two_parameters("bfloat16")
    weights = [[[1.0, 1.0]] * 7, [[1.0, 1.0], *([[1.2, 1.01], [1.01, 1.2]] * 3)]]
    for ledger, states in zip(ledgers, weights, strict=True):
        for begun, left in pairwise(states):
            _step(ledger.tracks[0], begun, [0.5, 0.1 + ledger.rank], left)
    assert _graver(ledgers) == ["LS101"]


def _codes_of_groups(samples, groups=((0, 1), (2, 3))):
    """Of the data that four ranks read, whose program has made these groups."""
    ledgers = []
    for rank, indices in enumerate(samples):
        rows = [[100 + index for index in indices]]
        read = _read(indices, "DistributedSampler", size=32, rows=rows, batches=list(indices))
        ledger = Ledger(rank=rank, world_size=4, loadings=[replace(read, used=[0, 1, 2, 3])])
        ledger.facts.subgroups = list(map(list, groups))
        # As a wrapper over all ranks does, beside these groups.
        wrapped = Parameter("weight", [1], "float32", wrapper="DistributedDataParallel")
        ledger.tracks = [Track("SGD#0", "SGD", [], [wrapped])]
        ledgers.append(ledger)
    return [found.code for found in DATA.judge(World(ledgers))]


def test_ranks_of_one_group_may_share_the_work_on_the_same_samples():
    """As of a sequence that is cut up among them, beside a wrapper over all ranks."""
    even, odd = list(range(0, 32, 2)), list(range(1, 32, 2))
    assert _codes_of_groups([even, even, odd, odd]) == []
    assert _codes_of_groups([even, odd, even, odd]) == ["LS503"]
    assert _codes_of_groups([even, even, odd, odd], groups=()) == ["LS503"]
    assert _codes_of_groups([even, even, even, even]) == ["LS503"]
    crossed = [(0, 1), (2, 3), (0, 2), (1, 3)]
    assert _codes_of_groups([even, even, odd, odd], crossed) == []
    assert _codes_of_groups([even, even, even, even], crossed) == ["LS503"]


def test_a_rule_that_asks_for_scales_hears_nothing_of_counts():
    """Not even in later steps, in which nothing is sampled."""
    ledgers = _recorded("bugs/f_tokens_per_rank")
    for ledger in ledgers:
        for step in ledger.tracks[0].steps:
            for backward in step.backwards:
                backward.local.clear()
    assert _graver(ledgers) == ["LS203"]
    assert list(OWN_SCALES.judge(World(ledgers))) == []


def test_a_notice_of_counts_is_told_once():
    told = [found.code for found in judge(_recorded("healthy/images_of_other_sizes"))]
    assert told == ["LS203"]


@pytest.mark.parametrize("is_own", [True, False])
def test_a_head_that_one_rank_reduces_in_its_own_group_is_held_by_it_alone(is_own):
    """As where each half of the ranks trains a task of its own, with a wrapper of its group."""
    ledgers = _recorded("healthy/plain")
    for ledger in ledgers:
        head = ledger.tracks[0].parameters[-1]
        head.name = f"head_{ledger.rank}.bias"
        head.group = [ledger.rank] if is_own else None
    assert ("LS305" in _graver(ledgers)) == (not is_own)


def test_loaders_that_follow_one_another_are_told_apart():
    probe = Probe()
    hook_in(probe)
    try:
        for _ in range(3):
            list(DataLoader(range(8)))
    finally:
        probe.stop()
    assert len({each.key for each in probe.ledger.loadings}) == 3


def test_steps_that_a_failure_cut_off_are_compared_unless_ranks_join():
    """Under `Join` ranks with fewer batches are in their next epoch: a k-th step is not a k-th."""
    ledgers = _recorded("bugs/c_own_noise_and_a_rank_fails")
    assert _graver(ledgers) == ["LS104"]
    for ledger in ledgers:
        ledger.facts.joins = True
    assert _graver(ledgers) == []


def test_the_same_inputs_without_a_wrapper_tell_nothing_where_losses_differ():
    ledgers = _recorded("bugs/g_same_draws_without_a_wrapper")
    assert _graver(ledgers) == ["LS508"]
    for step in ledgers[1].tracks[0].steps:
        for backward in step.backwards:
            backward.loss *= 1.5
    assert "LS508" not in {finding.code for finding in judge(ledgers)}
