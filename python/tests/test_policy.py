"""Policies: rows, episodes, states, arrays in and out."""

import copy
import gc
import pickle
import threading

import gymnasium
import numpy as np
import pytest

import elmur


def play(policy, seen, starts=None):
    """Logits of all steps, [steps, rows, outputs]."""
    return np.stack([policy.act(x, None if starts is None else starts[t], logits=True) for t, x in enumerate(seen)])


def test_rows_are_independent_permuting_them_permutes_actions(policy, seen):
    order = np.random.default_rng(1).permutation(8)
    plain, permuted = policy.with_rows(8), policy.with_rows(8)
    plain.reset(seeds=np.arange(8))
    permuted.reset(seeds=order)
    assert np.array_equal(play(plain, seen)[:, order], play(permuted, seen[:, order]))


def test_episode_start_forgets_those_rows_and_no_others(policy, seen):
    starts = np.zeros((40, 8), bool)
    starts[20, [1, 5]] = True
    marked, whole, fresh = (policy.with_rows(8) for _ in range(3))
    a, b = play(marked, seen, starts), play(whole, seen)
    assert np.array_equal(a[:20], b[:20]) and np.array_equal(a[:, [0, 2, 3, 4, 6, 7]], b[:, [0, 2, 3, 4, 6, 7]])
    assert not np.allclose(a[20:, 1], b[20:, 1])
    # Row 1 begins its second episode: what `reset` without seeds gives.
    fresh.reset()
    assert np.array_equal(play(fresh, seen[20:])[:, [1, 5]], a[20:, [1, 5]])
    assert marked.times == [40, 20, 40, 40, 40, 20, 40, 40]


def test_nothing_is_reset_by_itself(policy, seen):
    rows = policy.with_rows(8)
    play(rows, seen)
    assert rows.times == [40] * 8
    rows.reset(rows=[2, 3])
    rows.reset(rows=np.array([False] * 7 + [True]))
    rows.reset(rows=0)
    assert rows.times == [0, 40, 0, 0, 40, 40, 40, 0]


def test_the_same_seed_is_the_same_episode(policy, seen):
    a, b = (policy.with_rows(8) for _ in range(2))
    a.reset(seeds=7)
    b.reset(seeds=list(range(7, 15)))
    played = [play(x, seen) for x in (a, b)]
    assert np.array_equal(played[0], played[1])
    assert np.allclose(played[0][:, 1], play_row(policy, seen, 1, 8), atol=1e-4), "but for the last bits of products"
    a.reset(seeds=7)
    b.reset(seeds=8)
    drawn = [np.stack([x.act(y, deterministic=False) for y in seen]) for x in (a, b)]
    assert not np.array_equal(*drawn)
    a.reset(seeds=8)
    assert np.array_equal(drawn[1], np.stack([a.act(y, deterministic=False) for y in seen]))


def play_row(policy, seen, row, seed):
    one = policy.with_rows(1)
    one.reset(seeds=[seed])
    return np.stack([one.act(x[row], logits=True) for x in seen])


def test_snapshots_go_on_in_any_rows_and_after_pickling(policy, seen):
    rows = policy.with_rows(8)
    play(rows, seen[:25])
    kept = rows.snapshot(rows=[3, 4])
    rest = play(rows, seen[25:])
    for value in (kept, bytes(kept), pickle.loads(pickle.dumps(kept)), copy.deepcopy(kept)):
        other = policy.with_rows(2)
        other.restore(value)
        assert np.allclose(play(other, seen[25:, 3:5]), rest[:, 3:5], atol=1e-4), "but for the last bits of products"
        other = policy.with_rows(8)
        other.restore(value, rows=[6, 1])
        moved = play(other, seen[25:, [0, 4, 2, 0, 0, 0, 3, 0]])
        assert np.array_equal(moved[:, [6, 1]], rest[:, 3:5]), "bit for bit in as many rows"
    assert kept.times == [25, 25] and len(kept) == 2 and kept == elmur.Snapshot.from_bytes(bytes(kept))
    rows.restore(kept, rows=[0, 7])
    assert rows.times == [25, 40, 40, 40, 40, 40, 40, 25]
    with pytest.raises(elmur.ElmurError, match="expected 1 rows"):
        rows.restore(kept, rows=[0])
    with pytest.raises(elmur.ElmurError, match="snapshot"):
        rows.restore(b"nonsense", rows=[0, 1])
    with pytest.raises(TypeError, match="state: expected a Snapshot or its bytes, got int"):
        rows.restore(3)


def test_predict_is_a_function_of_its_state(policy, seen):
    rows = policy.with_rows(8)
    before = play(rows, seen[:5])
    state, states, actions = None, [], []
    for x in seen:
        action, state = policy.predict(x, state)
        states.append(state)
        actions.append(action)
    # Asked again, in another order, by another object, and drawing: the same.
    other = pickle.loads(pickle.dumps(policy))
    for t in (30, 3, 30, 11):
        again, after = other.predict(seen[t], states[t - 1])
        assert np.array_equal(again, actions[t]) and after == states[t]
    assert rows.times == [5] * 8 and before.shape == (5, 8, 4)
    start = np.arange(8) == 2
    _, marked = policy.predict(seen[9], states[8], episode_start=start)
    assert marked.times == [1 if row == 2 else 10 for row in range(8)]


def test_predict_agrees_with_act(policy, seen):
    rows = policy.with_rows(8)
    state = None
    for t, x in enumerate(seen):
        start = np.arange(8) == t % 11
        action, state = policy.predict(x, state, start if t else None, deterministic=True)
        assert np.array_equal(action, rows.act(x, start if t else None))
    assert rows.snapshot() == state


def test_one_row_needs_no_axis_of_rows(policy, seen):
    one = policy.with_rows(1)
    alone = one.act(seen[0, 0])
    one.reset(seeds=0)
    assert np.shape(alone) == () and np.issubdtype(alone.dtype, np.int64) and alone in one.action_space
    one.reset(seeds=0)
    assert one.act(seen[0, :1]).shape == (1,)
    action, state = one.predict(seen[0, 0])
    assert np.shape(action) == () and len(state) == 1
    assert one.act(seen[1, 0], True, logits=True).shape == (4,)


def test_observations_are_converted_where_nothing_is_lost(policy, seen):
    expected = policy.with_rows(8).act(np.rint(seen[0]).astype(np.float32), logits=True)
    whole = np.rint(seen[0])
    strided = np.zeros((16, 8))
    strided[::2, ::2] = whole
    class Tensor:
        def __array__(self, dtype=None, copy=None):
            return whole

    forms = [whole.astype(np.float64), whole.astype(np.int64), whole.astype(np.float16), whole.astype(">f4"), whole.tolist()]
    for form in (*forms, np.asfortranarray(whole), strided[::2, ::2], Tensor(), {"state": whole}, (whole,)):
        assert np.array_equal(policy.with_rows(8).act(form, logits=True), expected)
    flat = policy.with_rows(8).act(whole.reshape(8, 2, 2).astype(bool) * 1, logits=True)
    assert flat.shape == (8, 4)


@pytest.mark.parametrize(
    "form, message",
    [
        (np.zeros((7, 4)), r"observation: expected numbers of shape \(8, 4\), got float64 of shape \(7, 4\)"),
        (np.zeros(4), r"got float64 of shape \(4,\)"),
        (np.zeros((8, 5)), r"got float64 of shape \(8, 5\)"),
        (np.zeros((8, 4), complex), "observation: expected real numbers"),
        (np.full((8, 4), "a"), "observation: expected real numbers"),
        (np.full((8, 4), None), "got object"),
        ((np.zeros((8, 4)), np.zeros((8, 4))), "observation: expected numbers"),
        ({"a": np.zeros((8, 4)), "b": np.zeros((8, 4))}, "observation: expected one array, got 2"),
        (np.full((8, 4), np.nan), "finite"),
        (None, "observation: expected"),
    ],
)
def test_other_observations_are_refused_with_argument_expected_and_got(policy, form, message):
    rows = policy.with_rows(8)
    with pytest.raises(elmur.ElmurError, match=message):
        rows.act(form)
    assert rows.times == [0] * 8


def test_other_arguments_are_refused_too(policy, run, seen):
    rows = policy.with_rows(8)
    for starts in (np.zeros(7, bool), np.zeros(8), "no", np.zeros((8, 1), bool)):
        with pytest.raises(elmur.ElmurError, match="episode_start: expected booleans of shape"):
            rows.act(seen[0], starts)
    with pytest.raises(elmur.ElmurError, match="rows: expected numbers from 0 to 7, got 8"):
        rows.reset(rows=[8])
    with pytest.raises(elmur.ElmurError, match="seeds: expected 8 seeds"):
        rows.reset(seeds=[1, 2])
    with pytest.raises(elmur.ElmurError, match="seeds: expected an integer from 0 on"):
        rows.reset(seeds=-1)
    with pytest.raises(elmur.ElmurError, match="out: expected a writable"):
        rows.act(seen[0], out=np.zeros(8, np.float32))
    with pytest.raises(elmur.ElmurError, match="layer: expected a layer"):
        rows.memory(99)
    with pytest.raises(elmur.ElmurError, match="cpu, cuda or cuda:N"):
        elmur.Policy.load(run, device="tpu")


def test_deferred_writes_change_no_bit(policy, seen):
    at_once, later, unsettled = (policy.with_rows(8) for _ in range(3))
    later.defer_writes()
    unsettled.defer_writes()
    expected = play(at_once, seen)
    logits = []
    for x in seen:
        logits.append(later.act(x, logits=True))
        later.settle()
    assert np.array_equal(np.stack(logits), expected) and np.array_equal(play(unsettled, seen), expected)
    assert np.array_equal(unsettled.memory(0)[0], at_once.memory(0)[0])


def test_weights_of_bf16_are_near_and_stay_with_copies(policy, seen, tmp_path):
    policy.save(tmp_path / "policy")
    rounded = elmur.Policy.load(tmp_path / "policy", rows=8, weights="bf16")
    assert (rounded.weights, policy.weights) == ("bf16", "f32")
    assert rounded.with_rows(2).weights == "bf16" and pickle.loads(pickle.dumps(rounded)).weights == "bf16"
    exact, near = play(policy.with_rows(8), seen[:8]), play(rounded, seen[:8])
    assert not np.array_equal(exact, near) and np.allclose(exact, near, atol=0.1 * np.abs(exact).max())
    with pytest.raises(elmur.ElmurError, match="weights: expected f32 or bf16, got int4"):
        elmur.Policy.load(tmp_path / "policy", weights="int4")


def test_actions_are_written_where_the_caller_wants_them(policy, seen):
    rows, other = policy.with_rows(8), policy.with_rows(8)
    out = np.full(8, -1)
    assert rows.act(seen[0], out=out) is out
    assert np.array_equal(out, other.act(seen[0]))
    kept = other.act(seen[1])
    other.act(seen[2])
    assert np.array_equal(kept, rows.act(seen[1])), "results are not overwritten"


def test_memory_is_shown_read_only_with_its_ages(policy, seen):
    rows = policy.with_rows(8)
    slots, ages = rows.memory(0)
    config = rows.config
    assert slots.shape == (8, config["memory"]["slots"], config["d_model"]) and (ages == -1).all()
    with pytest.raises(ValueError, match="read-only"):
        slots[0] = 0
    segment = config["segment_length"]
    play(rows, np.repeat(seen, 4, 0)[: 2 * segment + 1])
    again, ages = rows.memory(0)
    assert not np.array_equal(again, slots) and set(np.unique(ages)) <= {-1, *range(2 * segment + 2)} and (ages >= 0).any()
    assert {"memory.0", "anchors.0"} <= set(rows.states())


def test_spaces_and_facts(policy, run):
    assert policy.observation_space == gymnasium.spaces.Box(-np.inf, np.inf, (4,))
    assert policy.action_space == gymnasium.spaces.Discrete(4)
    assert policy.rows == 1 and policy.device == "cpu" and policy.parameters > 1000 and not policy.reads_returns
    assert policy.config["kind"] == "elmur" and "elmur" in repr(policy)
    assert elmur.Policy.load(run.path / "checkpoints" / "last").parameters == policy.parameters


def test_saved_pickled_and_copied_policies_are_the_same(policy, seen, tmp_path):
    rows = policy.with_rows(8)
    play(rows, seen[:10])
    rows.save(tmp_path / "policy")
    others = [pickle.loads(pickle.dumps(rows)), copy.copy(rows), copy.deepcopy(rows)]
    assert all(other.times == [10] * 8 for other in others)
    expected = play(rows, seen[10:])
    assert all(np.array_equal(play(other, seen[10:]), expected) for other in others)
    loaded = elmur.Policy.load(tmp_path / "policy", rows=8)
    fresh = policy.with_rows(8)
    assert np.array_equal(play(loaded, seen), play(fresh, seen))


def test_dropping_in_any_order_never_crashes(run, seen):
    for order in range(6):
        policy = run.policy
        rows = policy.with_rows(8)
        snapshot = rows.snapshot()
        memory = rows.memory(0)[0]
        states = rows.states()
        actions = rows.act(seen[0])
        held = [policy, rows, snapshot, memory, states, actions]
        del policy, rows, snapshot, memory, states, actions
        for _ in range(len(held)):
            held.pop((7 * order) % len(held))
            gc.collect()
            for thing in held:
                repr(thing)


def test_two_threads_act_at_once(policy, seen):
    expected = play(policy.with_rows(8), np.repeat(seen, 5, 0))
    shared, results, errors = policy.with_rows(8), {}, []

    def own(i):
        results[i] = play(policy.with_rows(8), np.repeat(seen, 5, 0))

    def together(i):
        try:
            for x in seen:
                shared.act(x)
                policy.predict(x)
                shared.snapshot()
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2) for work in (own, together)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert not errors and shared.times == [80] * 8
    assert all(np.array_equal(result, expected) for result in results.values())


def test_lerobots_way_to_ask(policy, seen):
    one, other = policy.with_rows(8), policy.with_rows(8)
    batch = {"observation.state": seen[0], "task": ["go"] * 8, "action": None}
    assert np.array_equal(one.select_action(batch), other.act(seen[0]))
    assert np.array_equal(one.select_action(seen[1]), other.act(seen[1]))
    one.reset()
    assert one.times == [0] * 8
