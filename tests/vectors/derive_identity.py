"""Derives tests/vectors/identity.json with hashlib and struct alone.

It shares no code with the project: every message is spelled out here byte by byte, so that a vector
can be checked by hand with ``printf ... | sha256sum``. Run it to print the file; a test compares.
"""

import hashlib
import json
import struct
import sys


def sha(*parts):
    return hashlib.sha256(b"".join(parts)).digest()


def u32(ids):
    return struct.pack(f"<{len(ids)}I", *ids)


def u64(ids):
    return struct.pack(f"<{len(ids)}Q", *ids)


def s(text):
    return b"s" + u64([len(text.encode())]) + text.encode()


def i(number):
    return b"i" + u64([len(str(number))]) + str(number).encode()


def f(number):
    return b"f" + struct.pack("<d", number)


def lst(*items):
    return b"l" + u64([len(items)]) + b"".join(items)


def d(*pairs):
    """Pairs must be written in ascending key order."""
    assert list(pairs) == sorted(pairs, key=lambda p: p[0].encode())
    return b"d" + u64([len(pairs)]) + b"".join(s(k) + v for k, v in pairs)


def plain_links(ids, block, first=b""):
    out, last = [], first
    for at in range(0, len(ids) - block + 1, block):
        piece = ids[at : at + block]
        body = u32(piece) if max(piece) < 2**32 else b"\xff" + u64(piece)
        last = sha(last, body)
        out.append(last)
    return out


def chain_vectors():
    sixteen = list(range(16))
    long = [(7 * k + 3) % 151936 for k in range(200)]
    wide = list(range(16, 32))
    wide[5] = 2**40 + 7
    salted = sha(
        b"sglang-cache-namespace-v1", b"\x01", u64([6]), b"lora-a", b"\x01", u64([5]), b"saltX"
    )
    only_salt = sha(b"sglang-cache-namespace-v1", b"\x00", b"\x01", u64([5]), b"saltX")
    empty_salt = sha(b"sglang-cache-namespace-v1", b"\x00", b"\x01", u64([0]))
    cases = [
        ("sixteen", 16, sixteen, None, None, b""),
        ("block64", 64, long, None, None, b""),
        ("block1", 1, [1, 2, 3], None, None, b""),
        ("wide", 16, sixteen + wide + sixteen, None, None, b""),
        ("lora and salt", 16, long, "lora-a", "saltX", salted),
        ("salt", 16, sixteen, None, "saltX", only_salt),
        ("empty salt", 16, sixteen, None, "", empty_salt),
    ]
    return [
        {
            "name": name,
            "block_tokens": block,
            "tokens": ids,
            "lora_key": lora,
            "cache_salt": salt,
            "root": root.hex(),
            "links": [c.hex() for c in plain_links(ids, block, root)],
        }
        for name, block, ids, lora, salt, root in cases
    ]


def extras_vector():
    """Five blocks of 16; an image on tokens 20..50 and a prompt embedding at token 25."""
    ids = list(range(1000, 1080))
    image = bytes(range(32))
    embeds = bytes(range(100, 120))

    def item(pos, length, kind, digest):
        return lst(i(pos), i(length), s(kind), b"b" + u64([len(digest)]) + digest)

    extra = sha(b"ucm/extras/1", lst(item(20, 31, "image", image), item(25, 1, "embeds", embeds)))
    c0 = sha(u32(ids[:16]))
    c1 = sha(b"ucm/extralink/1", sha(c0, u32(ids[16:32])), extra)
    rest = plain_links(ids[32:], 16, c1)
    return {
        "block_tokens": 16,
        "tokens": ids,
        "extras": [[20, 31, "image", image.hex()], [25, 1, "embeds", embeds.hex()]],
        "links": [c.hex() for c in [c0, c1, *rest]],
    }


def seed_vectors():
    gqa = d(
        ("extra", d(("attention_chunk", b"N"), ("softcap", f(30.0)))),
        (
            "group",
            d(
                ("block_tokens", i(16)),
                ("compression", i(1)),
                ("dtype", s("bf16")),
                ("head_size", i(128)),
                ("heads", i(8)),
                ("kind", s("chain")),
                ("part", s("target")),
                ("role", s("")),
                ("window", b"N"),
            ),
        ),
        ("head_range", lst(i(4), i(8))),
        ("kv_dtype", s("bf16")),
        ("layers", lst(lst(i(0), i(3)), lst(i(5), i(6)))),
        ("quantization", b"N"),
        ("rope", d(("factor", f(8.0)), ("rope_theta", f(500000.0)), ("rope_type", s("llama3")))),
        ("weights", s("id:example")),
    )
    state = d(
        ("extra", d()),
        (
            "group",
            d(
                ("block_tokens", b"N"),
                ("compression", i(1)),
                ("dtype", s("fp32")),
                ("head_size", i(64)),
                ("heads", i(32)),
                ("kind", s("snapshot")),
                ("part", s("target")),
                ("role", s("")),
                ("window", b"N"),
            ),
        ),
        ("head_range", lst(i(0), i(32))),
        ("kv_dtype", s("bf16")),
        ("layers", lst(lst(i(1), i(2)))),
        ("quantization", s("fp8")),
        ("rope", b"N"),
        ("weights", s("id:example")),
    )
    links = plain_links(list(range(64)), 16)
    out = []
    for name, encoded in (("gqa", gqa), ("state", state)):
        seed = sha(b"ucm/1/", encoded)
        ids = [sha(seed, c)[:16].hex() for c in links]
        snaps = [[16, sha(seed, links[0], u64([16]))[:16].hex()]]
        snaps.append([64, sha(seed, links[3], u64([64]))[:16].hex()])
        tail = sha(links[3], u32([64, 65, 66]))  # 67 tokens: three in the tail
        snaps.append([67, sha(seed, tail, u64([67]))[:16].hex()])
        out.append(
            {
                "name": name,
                "encoded": encoded.hex(),
                "seed": seed.hex(),
                "object_ids": ids,
                "snapshot_ids": snaps,
            }
        )
    return out


def manifest_vector():
    fields = d(
        ("block_tokens", i(64)),
        ("format_version", i(1)),
        ("head_slices", i(2)),
        ("name", s("default")),
    )
    return {"encoded": fields.hex(), "digest": sha(b"ucm/namespace/1", fields).hex()}


def derive():
    return {
        "chains": chain_vectors(),
        "extras": extras_vector(),
        "seeds": seed_vectors(),
        "manifest": manifest_vector(),
    }


if __name__ == "__main__":
    json.dump(derive(), sys.stdout, indent=1)
    sys.stdout.write("\n")
