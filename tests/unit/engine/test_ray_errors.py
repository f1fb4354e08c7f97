# SPDX-License-Identifier: Apache-2.0
"""What a Ctrl-C is called where compiled code was waiting."""

import pytest

from lockstep.engine.keyboard_interrupt import reraise_keyboard_interrupt


def test_a_ctrl_c_in_compiled_code_is_a_ctrl_c():
    interrupt = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt) as caught, reraise_keyboard_interrupt():
        raise SystemError("<built-in method wait> returned a result with an exception set") from (
            interrupt
        )
    assert caught.value is interrupt


def test_another_error_of_the_interpreter_stays_what_it_is():
    with pytest.raises(SystemError), reraise_keyboard_interrupt():
        raise SystemError("bad call")
