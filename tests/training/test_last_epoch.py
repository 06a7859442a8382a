# SPDX-License-Identifier: Apache-2.0
"""What ranks tell each other of an epoch arrives as it was told."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from dgl_hybrid.training.last_epoch import LastEpoch, check_same_masks

NEWS = LastEpoch(
    epoch_ns=2**40,
    was_changed=True,
    has_drawn=False,
    change_ns=5,
    is_called_otherwise=True,
    num_written=2,
    steps_done=7,
    seed=2**63 - 1,
    has_other_call=False,
    dense_below=1,
    normed_below=2,
    is_on_gpu=False,
    are_not_all=True,
    num_asked=(3, 0, 1),
)


def test_integers_tell_all_of_it() -> None:
    told = NEWS.to_ints()
    assert all(type(value) is int for value in told)
    assert LastEpoch.from_ints(told) == NEWS
    for field in fields(LastEpoch):
        value = getattr(NEWS, field.name)
        other = (*value, 9) if isinstance(value, tuple) else not value if isinstance(value, bool) else value - 1
        changed = replace(NEWS, **{field.name: other})
        assert LastEpoch.from_ints(changed.to_ints()) == changed, field.name


def test_ranks_with_other_states_of_dropout_are_named() -> None:
    check_same_masks([NEWS, replace(NEWS, epoch_ns=0)])
    with pytest.raises(ValueError, match=r"rank 0 is at step 7 of seed .*, rank 1 at step 8 of seed"):
        check_same_masks([NEWS, replace(NEWS, steps_done=8)])
    with pytest.raises(ValueError, match="rank 2 at step 7 of seed 4"):
        check_same_masks([NEWS, NEWS, replace(NEWS, seed=4)])
