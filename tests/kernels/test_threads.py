"""Short calls run on one thread; a decoding step's own operations too, and its long products as before."""

import torch

from te_models.kernels.threads import LEAST_NS, on_one_thread, threads_for


def test_short_calls_stay_on_one_thread() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        assert threads_for(LEAST_NS - 1) == 1 and threads_for(LEAST_NS) == 3
        with on_one_thread():
            assert torch.get_num_threads() == 1 and threads_for(LEAST_NS) == 3
            with on_one_thread():
                assert threads_for(LEAST_NS - 1) == 1
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == threads_for(LEAST_NS) == 3
        torch.set_num_threads(2)
        with on_one_thread():
            assert torch.get_num_threads() == 1 and threads_for(LEAST_NS) == 2
    finally:
        torch.set_num_threads(before)
