#include "compress/codec.h"

#include <lz4.h>
#include <zstd.h>

#include <algorithm>
#include <climits>
#include <new>
#include <vector>

namespace ucm::compress {

struct Codec::Contexts {
  ZSTD_CCtx* pack = nullptr;
  ZSTD_DCtx* unpack = nullptr;
  std::vector<std::byte> lz4;

  ~Contexts() {
    ZSTD_freeCCtx(pack);
    ZSTD_freeDCtx(unpack);
  }
};

Codec::Codec(CodecKind kind, int level)
    : kind_(kind), acceleration_(std::max(1, -level)), contexts_(std::make_unique<Contexts>()) {
  contexts_->unpack = ZSTD_createDCtx();
  if (contexts_->unpack == nullptr) throw std::bad_alloc();
  if (kind == CodecKind::kLz4) contexts_->lz4.resize(static_cast<std::size_t>(LZ4_sizeofState()));
  if (kind != CodecKind::kZstd) return;
  contexts_->pack = ZSTD_createCCtx();
  if (contexts_->pack == nullptr) throw std::bad_alloc();
  // Length and checksum of the content are in our own header.
  ZSTD_CCtx_setParameter(contexts_->pack, ZSTD_c_compressionLevel, level);
  ZSTD_CCtx_setParameter(contexts_->pack, ZSTD_c_contentSizeFlag, 0);
  ZSTD_CCtx_setParameter(contexts_->pack, ZSTD_c_checksumFlag, 0);
}

Codec::~Codec() = default;

std::size_t Codec::compress(const std::byte* from, std::size_t bytes, std::byte* to,
                            std::size_t room) noexcept {
  if (kind_ == CodecKind::kZstd) {
    const std::size_t n = ZSTD_compress2(contexts_->pack, to, room, from, bytes);
    return ZSTD_isError(n) ? 0 : n;
  }
  if (kind_ == CodecKind::kLz4 && bytes <= LZ4_MAX_INPUT_SIZE) {
    return static_cast<std::size_t>(LZ4_compress_fast_extState(
        contexts_->lz4.data(), reinterpret_cast<const char*>(from), reinterpret_cast<char*>(to),
        static_cast<int>(bytes), static_cast<int>(std::min<std::size_t>(room, INT_MAX)),
        acceleration_));
  }
  return 0;
}

bool Codec::decompress(CodecKind kind, const std::byte* from, std::size_t bytes, std::byte* to,
                       std::size_t out_bytes) noexcept {
  if (kind == CodecKind::kZstd) {
    return ZSTD_decompressDCtx(contexts_->unpack, to, out_bytes, from, bytes) == out_bytes;
  }
  if (kind != CodecKind::kLz4 || bytes > INT_MAX || out_bytes > INT_MAX) return false;
  return LZ4_decompress_safe(reinterpret_cast<const char*>(from), reinterpret_cast<char*>(to),
                             static_cast<int>(bytes),
                             static_cast<int>(out_bytes)) == static_cast<int>(out_bytes);
}

}  // namespace ucm::compress
