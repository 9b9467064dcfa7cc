// Compression of shards as the Compress stage does it, and beside it a library over the bytes as they lie.
#include <zstd.h>

#include <cstring>
#include <fstream>
#include <iterator>
#include <memory>
#include <vector>

#include "compress/packer.h"
#include "meter.h"

namespace ucm::bench {
namespace {

struct Shards {
  std::vector<std::byte> bytes;
  std::uint64_t shard = 0;
  [[nodiscard]] std::size_t count() const { return bytes.size() / shard; }
  [[nodiscard]] const std::byte* at(std::size_t i) const { return bytes.data() + i * shard; }
};

const Shards& shards_of(const Args& args) {
  static Shards kept;
  static std::string path;
  if (path != args.text("path")) {
    std::ifstream file(args.text("path"), std::ios::binary);
    const std::vector<char> text{std::istreambuf_iterator<char>(file), {}};
    kept.shard = args.number("shard_bytes");
    kept.bytes.resize(text.size());
    std::memcpy(kept.bytes.data(), text.data(), text.size());
    if (kept.bytes.empty() || kept.bytes.size() % kept.shard != 0) {
      throw std::runtime_error(args.text("path") + " does not hold whole shards");
    }
    path = args.text("path");
  }
  return kept;
}

/// What was packed last and `by` which settings, so that unpacking has something to work on; one place
/// of `shard` bytes each.
struct Packed {
  std::string by;
  std::vector<std::byte> places;
  std::vector<std::uint64_t> bytes;

  /// True when nothing lies here that these settings made: pack first.
  [[nodiscard]] bool stale(const std::string& settings) const { return by != settings; }
};

std::string settings_of(const Args& args) {
  return args.text("path") + ' ' + args.text("codec") + ' ' + args.text("level") + ' ' +
         args.text("width");
}

CodecKind codec_of(const std::string& name) {
  return name == "zstd" ? CodecKind::kZstd : CodecKind::kLz4;
}

int level_of(const Args& args) {
  const std::string text = args.text("level");
  return std::stoi(text);
}

Report plain_zstd(const Args& args, const Shards& in, bool back) {
  static Packed kept;
  const std::string by = settings_of(args);
  if (back && kept.stale(by)) plain_zstd(args, in, false);
  const std::unique_ptr<ZSTD_CCtx, decltype(&ZSTD_freeCCtx)> pack(ZSTD_createCCtx(), ZSTD_freeCCtx);
  const std::unique_ptr<ZSTD_DCtx, decltype(&ZSTD_freeDCtx)> unpack(ZSTD_createDCtx(),
                                                                    ZSTD_freeDCtx);
  const std::size_t room = ZSTD_compressBound(in.shard);
  if (!back) {
    kept.places.resize(room * in.count());
    kept.bytes.assign(in.count(), 0);
    kept.by = by;
  }
  std::vector<std::byte> out(in.shard);
  std::uint64_t total = 0;
  const Meter meter;
  for (std::size_t i = 0; i < in.count(); ++i) {
    std::byte* const place = kept.places.data() + i * room;
    const std::size_t n =
        back ? ZSTD_decompressDCtx(unpack.get(), out.data(), in.shard, place, kept.bytes[i])
             : ZSTD_compressCCtx(pack.get(), place, room, in.at(i), in.shard, level_of(args));
    if (ZSTD_isError(n)) throw std::runtime_error(ZSTD_getErrorName(n));
    if (!back) kept.bytes[i] = n;
    total += n;
  }
  return {meter.stop(), total, in.bytes.size()};
}

}  // namespace

/// `how`: pack, unpack (what pack left), zstd, unzstd (bytes as they lie), copy. `operations` of the
/// answer are the bytes that came out. Where nothing was packed yet, unpack and unzstd pack first, untimed.
Report pack_shards(const Args& args) {
  const Shards& in = shards_of(args);
  const std::string how = args.text("how");
  if (how == "zstd" || how == "unzstd") return plain_zstd(args, in, how == "unzstd");
  static Packed kept;
  static std::vector<std::byte> out;
  out.resize(in.bytes.size());
  if (how == "copy") {
    const Meter meter;
    std::memcpy(out.data(), in.bytes.data(), in.bytes.size());
    return {meter.stop(), in.bytes.size(), in.bytes.size()};
  }
  compress::Packer packer(in.shard, in.shard - kIoAlign, codec_of(args.text("codec")),
                          level_of(args), static_cast<std::uint32_t>(args.number("width")));
  const std::string by = settings_of(args);
  const auto pack_all = [&] {
    kept.places.resize(in.bytes.size());
    kept.bytes.assign(in.count(), 0);
    kept.by = by;
    std::uint64_t packed = 0;
    for (std::size_t i = 0; i < in.count(); ++i) {
      kept.bytes[i] = packer.pack(in.at(i), kept.places.data() + i * in.shard);
      packed += kept.bytes[i] == 0 ? in.shard : kept.bytes[i];
    }
    return packed;
  };
  std::uint64_t total = 0;
  if (how == "pack") {
    const Meter meter;
    total = pack_all();
    return {meter.stop(), total, in.bytes.size()};
  }
  if (how != "unpack") throw std::runtime_error("unknown: " + how);
  if (kept.stale(by)) pack_all();
  out = kept.places;  // it is unpacked in place
  const Meter meter;
  for (std::size_t i = 0; i < in.count(); ++i) {
    std::byte* const place = out.data() + i * in.shard;
    if (kept.bytes[i] == 0) continue;
    if (packer.unpack(place, kept.bytes[i]) != compress::Unpacked::kOk ||
        std::memcmp(place, in.at(i), 64) != 0) {
      throw std::runtime_error("a shard did not come back");
    }
    total += in.shard;
  }
  return {meter.stop(), total, in.bytes.size()};
}

}  // namespace ucm::bench
