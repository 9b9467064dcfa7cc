"""What published models keep, derived by hand from their ``config.json`` and layer lists.

Nothing here was taken from this package's output. Each derivation is written beside its numbers; layers
are read off the published lists, bytes are multiplied out. Blocks of 64 tokens unless a ratio asks for more.
"""

from __future__ import annotations

from dataclasses import dataclass

#: bytes of an element
BF16, FP32 = 2, 4


@dataclass(frozen=True)
class Group:
    """``entry``: bytes of one entry of one layer over all heads. ``per_token``: bytes per token of all
    layers (of a state: bytes of all layers). ``block``: tokens of a stored block; the grid of a state."""

    kind: str
    layers: tuple[int, ...]
    entry: int
    per_token: float
    heads: int = 1
    head_size: int = 1
    rank: str = "intersection"
    window: int | None = None
    ratio: int = 1
    block: int = 64
    role: str = ""
    follows: int | None = None  # place in the list
    part: str = "target"
    dtype: str = "bf16"


def full(*layers: int | range, **fields: object) -> Group:
    return Group("chain", _flat(layers), **fields)  # type: ignore[arg-type]


def _flat(layers: tuple[int | range, ...]) -> tuple[int, ...]:
    return tuple(i for each in layers for i in (each if isinstance(each, range) else (each,)))


def index(of: int, *layers: int | range, **fields: object) -> Group:
    return Group(
        "sidecar",
        _flat(layers),
        rank="union",
        role="indexer",
        follows=of,
        **fields,  # type: ignore[arg-type]
    )


# num_hidden_layers 32, num_key_value_heads 8, no head_dim: hidden_size 4096 / 32 heads = 128.
# K and V: 2 x 8 x 128 x 2 B = 4096; x 32 layers = 131072.
LLAMA_3_1_8B = [full(range(32), entry=4096, per_token=131_072, heads=8, head_size=128)]

# 28 layers; head_dim 128 is given and is not 1024 / 16; use_sliding_window false, sliding_window null.
# 2 x 8 x 128 x 2 B = 4096; x 28 = 114688.
QWEN3_0_6B = [full(range(28), entry=4096, per_token=114_688, heads=8, head_size=128)]

# MLA: kv_lora_rank 512 + qk_rope_head_dim 64 = 576 elements for all heads, x 2 B = 1152; equal on all
# ranks. 61 layers: 70272. One next-token layer of the same kind.
DEEPSEEK_V3 = [
    full(range(61), entry=1152, per_token=70_272, head_size=576, rank="union"),
    full(0, entry=1152, per_token=1152, head_size=576, rank="union", part="draft"),
]

# The same architecture, and num_nextn_predict_layers 0: no draft layer.
KIMI_K2 = [full(range(61), entry=1152, per_token=70_272, head_size=576, rank="union")]

# As V3, and an indexer in every layer: index_head_dim 128 fp8 keys + one fp32 scale = 132 B;
# x 61 = 8052. The next-token layer has one as well.
DEEPSEEK_V3_2 = [
    full(range(61), entry=1152, per_token=70_272, head_size=576, rank="union"),
    index(0, range(61), entry=132, per_token=8052, head_size=128, dtype="fp8+scale"),
    full(0, entry=1152, per_token=1152, head_size=576, rank="union", part="draft"),
    index(2, 0, entry=132, per_token=132, head_size=128, dtype="fp8+scale", part="draft"),
]

# The same with 78 layers (head_dim 64 is that of the rope part, and means nothing here):
# 78 x 1152 = 89856, 78 x 132 = 10296. One next-token layer.
GLM_5 = [
    full(range(78), entry=1152, per_token=89_856, head_size=576, rank="union"),
    index(0, range(78), entry=132, per_token=10_296, head_size=128, dtype="fp8+scale"),
    full(0, entry=1152, per_token=1152, head_size=576, rank="union", part="draft"),
    index(2, 0, entry=132, per_token=132, head_size=128, dtype="fp8+scale", part="draft"),
]

# compress_ratios has 44 numbers for 43 layers and num_nextn_predict_layers 1: the last (0) is the draft
# layer's. 0, 0, then 4 on even and 128 on odd layers up to 42. Every layer keeps a sliding window of 128
# tokens, one 512-element vector each: 512 x 2 B = 1024; x 43 = 44032. A ratio r keeps one more vector
# for r tokens: 1024 / 4 = 256 a token, x 21 = 5376; 1024 / 128 = 8 a token, x 20 = 160, in blocks of
# 128 tokens. Ratio 4 has an indexer over its entries: 132 B for 4 tokens, 33 a token, x 21 = 693.
DEEPSEEK_V4_FLASH = [
    full(range(43), entry=1024, per_token=44_032, head_size=512, rank="union", window=128),
    full(
        range(2, 43, 2),
        entry=1024,
        per_token=5376,
        head_size=512,
        rank="union",
        ratio=4,
        role="compressed",
    ),
    index(1, range(2, 43, 2), entry=132, per_token=693, head_size=128, ratio=4, dtype="fp8+scale"),
    full(
        range(3, 42, 2),
        entry=1024,
        per_token=160,
        head_size=512,
        rank="union",
        ratio=128,
        block=128,
        role="compressed",
    ),
    full(0, entry=1024, per_token=1024, head_size=512, rank="union", window=128, part="draft"),
]

# text_config: 30 layers, full at 5, 11, 17, 23, 29. Sliding: 8 kv heads x 256, window 1024:
# 2 x 8 x 256 x 2 B = 8192; x 25 = 204800. Full: num_global_key_value_heads 2 x global_head_dim 512:
# 2 x 2 x 512 x 2 B = 4096; x 5 = 20480. attention_k_eq_v shares a projection, not the cached bytes (K is
# rotated, V is not). num_kv_shared_layers 0: no followers.
GEMMA_4_26B = [
    full(
        range(5), range(6, 11), range(12, 17), range(18, 23), range(24, 29),
        entry=8192, per_token=204_800, heads=8, head_size=256, window=1024,
    ),
    full(5, 11, 17, 23, 29, entry=4096, per_token=20_480, heads=2, head_size=512),
]  # fmt: skip

# text_config: 48 layers; attention_chunk_size 8192. The file leaves out which layers have no rotary
# embedding; the model's own default is every fourth (3, 7, ..., 47), and those attend to everything, the
# other 36 to their chunk. 2 x 8 x 128 x 2 B = 4096; x 36 = 147456, x 12 = 49152.
LLAMA_4_SCOUT = [
    full(
        *(i for i in range(48) if i not in {3, 7, 11, 15, 19, 23, 27, 31, 35, 39, 43, 47}),
        entry=4096, per_token=147_456, heads=8, head_size=128, window=8192,
    ),
    full(3, 7, 11, 15, 19, 23, 27, 31, 35, 39, 43, 47,
         entry=4096, per_token=49_152, heads=8, head_size=128),
]  # fmt: skip

# layer_types alternates, sliding (128) first; 24 layers; no dtype in the file: bf16.
# 2 x 8 x 64 x 2 B = 2048; x 12 = 24576 each.
GPT_OSS_20B = [
    full(*range(0, 24, 2), entry=2048, per_token=24_576, heads=8, head_size=64, window=128),
    full(*range(1, 24, 2), entry=2048, per_token=24_576, heads=8, head_size=64),
]

# text_config: 40 layers, every fourth full (3, 7, ..., 39): 2 kv heads x 256: 2 x 2 x 256 x 2 B = 2048;
# x 10 = 20480. The other 30 gated delta rule: per value head (32) a 128 x 128 fp32 matrix (mamba_ssm_dtype):
# 32 x 128 x 128 x 4 B = 2097152; the last 3 (kernel 4) inputs of the convolution over
# q and k (2 x 16 x 128 = 4096) and v (32 x 128 = 4096) channels in bf16: 3 x 8192 x 2 B = 49152.
# Together 2146304 a layer, x 30 = 64389120. One draft layer, with full attention.
QWEN3_5_35B = [
    Group(
        "snapshot",
        tuple(i for i in range(40) if i % 4 != 3),
        2_146_304,
        64_389_120,
        heads=32,
        head_size=128,
        dtype="fp32+bf16",
    ),
    full(*range(3, 40, 4), entry=2048, per_token=20_480, heads=2, head_size=256),
    full(0, entry=2048, per_token=2048, heads=2, head_size=256, part="draft"),
]

# hybrid_override_pattern, cut at the attention layers (*):
#   MEMEM*  EMEMEM*  EMEMEM*  EMEMEM*  EMEMEM*  EMEMEMEM*  EMEMEMEME
#   0    5  6    12  13   19  20   26  27   33  34     42  43     51
# M: 64 heads x 64 x state 128 x 4 B (fp32) = 2097152, and 3 inputs (kernel 4) of 64 x 64 + 2 x 8 groups
# x 128 = 6144 channels in bf16: 3 x 6144 x 2 B = 36864; together 2134016, x 23 = 49082368.
# *: 2 x 2 heads x 128 x 2 B = 1024, x 6 = 6144. E (experts) keeps nothing.
NEMOTRON_3_NANO = [
    Group(
        "snapshot",
        (0, 2, 4, 7, 9, 11, 14, 16, 18, 21, 23, 25, 28, 30, 32, 35, 37, 39, 41, 44, 46, 48, 50),
        2_134_016,
        49_082_368,
        heads=64,
        head_size=64,
        dtype="fp32+bf16",
    ),
    Group(
        "none",
        (1, 3, 6, 8, 10, 13, 15, 17, 20, 22, 24, 27, 29, 31, 34, 36, 38, 40, 43, 45, 47, 49, 51),
        0,
        0,
        dtype="",
    ),
    full(5, 12, 19, 26, 33, 42, entry=1024, per_token=6144, heads=2, head_size=128),
]

# 60 layers, 4 kv heads x 128: 2 x 4 x 128 x 2 B = 2048; x 60 = 122880. sparse_attention_freq: 0 on the
# first three layers, 1 on 57: one index key of sparse_index_dim 128 for all heads, bf16: 256, x 57 = 14592
# (sparse_disable_index_value: keys only). num_mtp_modules 7 draft layers, always sparse; the number of
# tokens predicted at once (num_nextn_predict_layers 1) is another thing. 7 x 2048, 7 x 256.
MINIMAX_M3 = [
    full(range(60), entry=2048, per_token=122_880, heads=4, head_size=128),
    index(0, range(3, 60), entry=256, per_token=14_592, head_size=128),
    full(range(7), entry=2048, per_token=14_336, heads=4, head_size=128, part="draft"),
    index(2, range(7), entry=256, per_token=1792, head_size=128, part="draft"),
]

TABLES = {
    "meta-llama--Meta-Llama-3.1-8B": LLAMA_3_1_8B,
    "Qwen--Qwen3-0.6B": QWEN3_0_6B,
    "deepseek-ai--DeepSeek-V3": DEEPSEEK_V3,
    "moonshotai--Kimi-K2-Instruct": KIMI_K2,
    "deepseek-ai--DeepSeek-V3.2": DEEPSEEK_V3_2,
    "zai-org--GLM-5": GLM_5,
    "deepseek-ai--DeepSeek-V4-Flash": DEEPSEEK_V4_FLASH,
    "google--gemma-4-26B-A4B": GEMMA_4_26B,
    "meta-llama--Llama-4-Scout-17B-16E-Instruct": LLAMA_4_SCOUT,
    "openai--gpt-oss-20b": GPT_OSS_20B,
    "Qwen--Qwen3.5-35B-A3B": QWEN3_5_35B,
    "nvidia--NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": NEMOTRON_3_NANO,
    "MiniMaxAI--MiniMax-M3": MINIMAX_M3,
}

#: Bytes of a block of all chain rows and their sidecars, and of 10^6 tokens, multiplied out once more:
#: 64 x 70272; 15625 x 4497408. Windows and ratios: 64 x 44032 + 64 x 5376 + 64 x 693 + 128 x 160.
SUMS = {
    "moonshotai--Kimi-K2-Instruct": (4_497_408, 70_272_000_000),
    "meta-llama--Meta-Llama-3.1-8B": (8_388_608, 131_072_000_000),
    "openai--gpt-oss-20b": (2 * 1_572_864, 49_152_000_000),
    # 64 x (44032 + 5376 + 693 + 1024) + 128 x 160; and 7812 whole blocks of 128 for the last kind
    "deepseek-ai--DeepSeek-V4-Flash": (3_292_480, 51_125_000_000 + 7812 * 20_480),
}
