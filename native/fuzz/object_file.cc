// An object's file with whatever bytes: judged without crashing, and never both sound and wrong.
#include <algorithm>
#include <cstring>
#include <optional>
#include <vector>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include "posix/format.h"
#include "target.h"

namespace {

using namespace ucm;
using namespace ucm::posix;

Geometry geometry() {
  Geometry g;
  g.shard_count = 3;
  g.shard_bytes = 500;
  g.runs = {{500, 1, 0}};
  g.layout = "v=1;order=token.head.dim;dtype=bf16";
  return g;
}

/// Makes the checksums fit what the header says by now, so that what lies behind them is reached.
void seal(std::vector<std::byte>& file, bool layout_too) {
  FixedHeader h;
  std::memcpy(&h, file.data(), sizeof h);
  const std::uint64_t text_at = sizeof h + std::uint64_t{8} * h.shard_count;
  if (layout_too && text_at + h.layout_bytes <= kIoAlign) {
    h.layout_hash = XXH3_64bits(file.data() + text_at, h.layout_bytes);
  }
  h.fixed_check = XXH3_64bits(&h, offsetof(FixedHeader, fixed_check));
  std::memcpy(file.data(), &h, sizeof h);
}

}  // namespace

int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  // It remembers the layouts it met, up to a bound: a fresh one now and then.
  static std::optional<Format> made;
  static unsigned runs = 0;
  if (runs++ % 64 == 0) made.emplace(geometry(), std::array<std::uint8_t, 32>{1, 2, 3});
  const Format& format = *made;
  static const BlockId id = [] {
    BlockId i;
    i.bytes[0] = 7;
    return i;
  }();
  const std::size_t whole = format.file_bytes();
  std::vector<std::byte> file(whole);
  // A good file first, so that single bytes of it are what the input changes.
  for (std::size_t i = format.header_bytes(); i < whole; ++i)
    file[i] = static_cast<std::byte>(i * 7);
  format.encode(id, file.data() + format.header_bytes(), nullptr, file.data());
  const std::vector<std::byte> good = file;
  if (size >= 1 && (data[0] & 1) != 0) {
    // Pairs of a position and a byte.
    for (std::size_t i = 1; i + 2 < size; i += 3) {
      const std::size_t at = (data[i] | std::size_t{data[i + 1]} << 8) % whole;
      file[at] = static_cast<std::byte>(data[i + 2]);
    }
  } else if (size > 1) {
    std::memcpy(file.data(), data + 1, std::min(size - 1, whole));
  }
  if (size >= 1 && (data[0] & 4) != 0) seal(file, (data[0] & 8) != 0);
  const std::uint64_t bytes = size >= 1 && (data[0] & 2) != 0 ? whole - 1 : whole;
  const ForeignLayout* foreign = nullptr;
  const Verdict verdict = format.judge(id, file.data(), bytes, foreign);
  if (verdict == Verdict::kConvertible && foreign == nullptr) __builtin_trap();
  if (verdict != Verdict::kOurs) return 0;
  if (bytes != whole) __builtin_trap();
  if (!Format::tail_sound(format.geometry(), file.data())) return 0;
  const std::byte* const object = file.data() + format.header_bytes();
  for (std::uint32_t i = 0; i < 3; ++i) {
    if (!Format::shards_sound(format.geometry(), file.data(), object, i, i + 1)) continue;
    // Sound means: these are the bytes that were written (64-bit checksums, small changes).
    const std::size_t at = format.geometry().shard_offset(i);
    if (size >= 1 && (data[0] & 1) != 0 && size < 64 &&
        std::memcmp(object + at, good.data() + format.header_bytes() + at, 500) != 0) {
      __builtin_trap();
    }
  }
  return 0;
}
