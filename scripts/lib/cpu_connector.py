"""A vLLM hidden-states connector for CPU engines.

vLLM's own connector copies through CUDA streams and pinned memory; on a CPU the
states are already in host memory, so a clone before the blocks are freed will do.
vLLM loads this module by name in its worker (`kv_connector_module_path`).
"""

import os
from functools import partial

import torch
from vllm.distributed.kv_transfer.kv_connector.v1 import example_hidden_states_connector as base


class _Done:
    """Stands for a CUDA event whose copy has finished."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


class CpuHiddenStatesConnector(base.ExampleHiddenStatesConnector):
    """Writes each finished request's states [tokens, layers, hidden] to a file."""

    def _submit_async_write(self, pending) -> None:
        assert self._kv_cache is not None
        blocks = torch.tensor(pending.block_ids, dtype=torch.long)
        offsets = torch.arange(self._block_size, dtype=torch.long)
        slots = (blocks[:, None] * self._block_size + offsets[None, :]).flatten()
        count = pending.token_ids.shape[0]
        # Fancy indexing copies, so the blocks may be reused once this returns.
        states = base.extract_from_kv_cache(self._kv_cache, slots[:count], count)
        os.makedirs(os.path.dirname(pending.filename), exist_ok=True)
        done = _Done()
        future = self._executor.submit(
            self._write_tensors,
            {"hidden_states": states.contiguous(), "token_ids": pending.token_ids.clone()},
            done, pending.filename, self._lock_fds.pop(pending.req_id, None),
        )  # fmt: skip
        self._req_copy_events[pending.req_id] = done
        self._req_futures[pending.req_id] = future
        future.add_done_callback(partial(self._on_write_done, pending.req_id))
