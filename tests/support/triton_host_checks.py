"""Further Triton kernels against their twins, on the host alone: on a device tests/e2e/test_cuda*.py run them."""

from __future__ import annotations

import torch


def rows_of_logits() -> None:
    from lockstep.kernels import logprob
    from lockstep.kernels import logprob_triton as triton_logprob
    from lockstep.kernels.sampling import LEFT_OUT

    torch.manual_seed(0)
    targets = torch.tensor([0, 5, 4499])
    upstream, spread = torch.randn(2, 3)
    for softcap in (None, 2.0):
        for temperature in (1.0, 0.7):
            for dtype in (torch.float32, torch.bfloat16, torch.float16):
                logits = (torch.randn(3, 4500) * 5).to(dtype)
                logits[:, 100:4400] = max(LEFT_OUT, torch.finfo(dtype).min)
                twins = logprob.row_logprobs(logits, targets, temperature, True, softcap)
                found = triton_logprob.row_logprobs(logits, targets, temperature, True, softcap)
                for a, b in zip(found, twins, strict=True):
                    torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
                for more in ((None, None), (twins[2], spread)):
                    given = (targets, twins[0], upstream, temperature, *more, softcap)
                    twin = logprob.row_gradients_(logits.clone(), *given).float()
                    fused = triton_logprob.row_gradients_(logits.clone(), *given).float()
                    assert (fused[:, 100:4400] == 0).all()
                    assert (fused - twin).norm() <= (1e-5 if dtype == torch.float32 else 1e-2) * twin.norm()


def drawing_tokens() -> None:
    """All ways to sample; rows of one part and of several, of which one holds nothing, and logits in all types."""
    from lockstep.kernels.sampling import sequence_keys
    from lockstep.rollout.native.sampler import choose
    from lockstep.types import Sampling

    torch.manual_seed(0)
    keys = torch.tensor([sequence_keys(3, row, 1) for row in range(3)], dtype=torch.int32)
    positions = torch.arange(3) * 1000
    every = {"temperature": 1.3, "top_k": 40, "top_p": 0.9, "min_p": 0.01}
    ways = [
        *({}, {"temperature": 0.7}, {"temperature": 0.0}, {"top_k": 5}, {"top_p": 0.8}, {"min_p": 0.1}),
        *({**every, "score_truncated": score} for score in (0, 1)),
    ]
    for vocabulary, dtype in ((7, torch.float32), (4096, torch.float16), (9001, torch.bfloat16)):
        logits = (torch.randn(3, vocabulary) * 3).to(dtype)
        logits[:, 4096:8192] = -float("inf")
        for way in ways:
            sampling = Sampling(1, **way)
            tokens, logprobs = choose(logits, sampling, keys, positions, kernel="triton")
            twins, scores = choose(logits, sampling, keys, positions)
            assert torch.equal(tokens, twins), (vocabulary, sampling)
            torch.testing.assert_close(logprobs, scores, rtol=1e-6, atol=2e-6)
    ties = torch.zeros(1, 9000)
    greedy = Sampling(1, 0.0)
    assert choose(ties, greedy, keys[:1], positions[:1], kernel="triton")[0].item() == 0
    ties[0, [77, 5000]] = float("nan")
    found, score = choose(ties, greedy, keys[:1], positions[:1], kernel="triton")
    assert found.item() == 77
    assert score.isnan().all()


def decoding() -> None:
    from lockstep.kernels.attention.paged import gathered_decode
    from lockstep.kernels.attention.paged_triton import paged_decode

    torch.manual_seed(0)
    lengths, block, width = torch.tensor([1, 7, 50]), 16, 4
    table = torch.randperm(3 * width).view(3, width)
    last = lengths - 1
    slots = table.gather(1, (last // block)[:, None])[:, 0] * block + last % block
    every = [(None, None, False), (37, None, False), (1, 3.0, False), (None, 3.0, True), (37, None, True)]
    for heads, groups, size, cases in ((6, 2, 40, every), (2, 2, 32, every[:2])):
        keys, values = torch.randn(2, 3 * width * block, groups, size)
        query = torch.randn(3, heads, size) * 3
        # As a projection gives them: heads are not the outer dimension in memory.
        new = keys[slots].transpose(0, 1).contiguous().transpose(0, 1), values[slots]
        for window, softcap, sinking in cases:
            sinks = (torch.randn(heads) * 3).to(torch.bfloat16 if window else torch.float32) if sinking else None
            given = (table, lengths, block, size**-0.5, window, softcap, sinks)
            expected = gathered_decode(query, keys, values, *given)
            for splits in (1, 4):
                found = paged_decode(query, keys, values, *given, None, splits)
                torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
                # The last token's keys and values are not there yet: they are read, and written where they belong.
                poor = keys.index_fill(0, slots, 7.0), values.index_fill(0, slots, 7.0)
                found = paged_decode(query, *poor, *given, new, splits)
                torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
                assert torch.equal(poor[0], keys)
                assert torch.equal(poor[1], values)


def tanh_near_0_and_far_from_it() -> None:
    from triton_tanh import tanh_of

    given = [torch.linspace(-12, 12, 2000), torch.logspace(-8, 4, 2000), torch.tensor([0.0, 0.1, -0.1, 1e30, -1e30])]
    x = torch.cat([*given, torch.zeros(8192 - sum(map(len, given)))])
    torch.testing.assert_close(tanh_of(x).double(), x.double().tanh(), rtol=1e-6, atol=0)


def kept_by_recurrent_layers() -> None:
    """The numbers that autograd keeps for a layer of Qwen3.5 and of Bamba, beside those that the memory plan counts."""
    import transformers
    from torch.autograd.graph import saved_tensors_hooks

    from lockstep.device.select import select
    from lockstep.kernels.attention.interface import ATTENTION, register_attention
    from lockstep.kernels.fused import fuse
    from lockstep.model.check import packed_row
    from lockstep.model.policy import Policy
    from lockstep.preflight import state_sizes
    from lockstep.preflight.model_sizes import LayerKernels, activation_bytes
    from recurrent_checks import small_chunks

    register_attention()
    common = {
        "vocab_size": 100, "hidden_size": 48, "intermediate_size": 40, "num_hidden_layers": 1, "num_attention_heads": 2,
        "num_key_value_heads": 1, "pad_token_id": 0, "attn_implementation": ATTENTION,
    }  # fmt: skip
    delta = transformers.Qwen3_5TextConfig(
        head_dim=16, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16,
        linear_value_head_dim=32, layer_types=["linear_attention"], **common,
    )  # fmt: skip
    mamba = transformers.BambaConfig(
        mamba_n_heads=3, mamba_d_head=32, mamba_n_groups=1, mamba_d_state=16, mamba_expand=2, attn_layer_indices=[],
        attn_rotary_emb=8, **common,
    )  # fmt: skip
    tokens, chunk = 64, state_sizes.CHUNK
    with small_chunks("cpu"):
        state_sizes.CHUNK = 16
        try:
            for config in (delta, mamba):
                model = transformers.AutoModelForCausalLM.from_config(config, trust_remote_code=False).train()
                fuse(model, "flash_varlen")
                policy = Policy(model, type(select("cpu")).attention)
                kept: dict[int, int] = {}
                weights = {one.untyped_storage().data_ptr() for one in model.parameters()}

                def keep(tensor: torch.Tensor, kept: dict[int, int] = kept) -> torch.Tensor:
                    storage = tensor.untyped_storage()
                    kept[storage.data_ptr()] = storage.nbytes()
                    return tensor

                with saved_tensors_hooks(keep, lambda tensor: tensor):
                    policy.decoder(packed_row([list(range(1, tokens + 1))], torch.device("cpu")))
                found = sum(size for address, size in kept.items() if address not in weights)
                counted = activation_bytes(config, tokens, 4, False, LayerKernels(True, True))
                assert 0.93 < counted / found < 1.07, (config.model_type, counted / found)
        finally:
            state_sizes.CHUNK = chunk


CHECKS = {
    check.__name__: check
    for check in (rows_of_logits, drawing_tokens, decoding, tanh_near_0_and_far_from_it, kept_by_recurrent_layers)
}
