import subprocess
import sys
import threading

from jaxllm.engine.warm_up import WarmUp


def started(*arguments) -> WarmUp:
    warm_up = WarmUp(*arguments)
    warm_up.start()
    return warm_up


def test_keys_are_made_in_order_and_the_end_is_told():
    made, ended = [], []
    warm_up = started(made.append, range(5), 1, lambda: ended.append(len(made)))
    assert warm_up.wait(10)
    assert (made, ended) == ([0, 1, 2, 3, 4], [5])


def test_nothing_to_make_has_ended_at_once():
    assert started(print, [], 4, lambda: None).wait(0)


def test_an_error_is_logged_and_the_rest_is_made(caplog):
    made = []

    def make(key: int) -> None:
        if key == 1:
            raise ValueError("no such shape\nmore")
        made.append(key)

    assert started(make, [0, 1, 2], 2, lambda: None).wait(10)
    assert sorted(made) == [0, 2]
    assert caplog.messages == ["1 did not compile ahead: ValueError: no such shape"]


def test_a_stop_drops_what_is_not_begun_and_waits_for_the_rest():
    made, begun, go_on = [], threading.Event(), threading.Event()

    def make(key: int) -> None:
        begun.set()
        go_on.wait(10)
        made.append(key)

    warm_up = started(make, range(100), 1, lambda: None)
    assert begun.wait(10)
    assert not warm_up.wait(0.01)
    threading.Timer(0.1, go_on.set).start()
    warm_up.stop()
    assert made == [0]
    warm_up.stop()


def test_threads_take_turns_more_often_until_the_last_warm_up_has_ended():
    usual, go_on = sys.getswitchinterval(), [threading.Event(), threading.Event()]
    warm_ups = [started(lambda key, i=i: go_on[i].wait(10), [0], 1, lambda: None) for i in range(2)]
    assert sys.getswitchinterval() < usual / 10
    go_on[0].set()
    assert warm_ups[0].wait(10)
    assert sys.getswitchinterval() < usual / 10
    go_on[1].set()
    assert warm_ups[1].wait(10)
    assert sys.getswitchinterval() == usual


def test_the_interpreter_ends_though_nobody_stops_it():
    program = (
        "import time; from jaxllm.engine.warm_up import WarmUp\n"
        "kept = WarmUp(lambda key: time.sleep(0.2), range(1000), 2, lambda: None)\nkept.start()\n"
        "print('end')"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert (done.stdout, done.stderr) == ("end\n", "")
