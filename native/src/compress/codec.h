// One compressor and decompressor with its working memory; used by one thread.
#pragma once

#include <cstddef>
#include <memory>

#include "ucm/compress.h"

namespace ucm::compress {

class Codec {
 public:
  /// Takes the working memory of both directions and both libraries. Throws std::bad_alloc.
  Codec(CodecKind kind, int level);
  ~Codec();
  Codec(const Codec&) = delete;
  Codec& operator=(const Codec&) = delete;

  [[nodiscard]] CodecKind kind() const noexcept { return kind_; }

  /// Returns the bytes written to `to`, or 0: they would be more than `room`.
  [[nodiscard]] std::size_t compress(const std::byte* from, std::size_t bytes, std::byte* to,
                                     std::size_t room) noexcept;
  /// False unless `from` holds exactly `out_bytes` bytes as `kind` compressed them. Never writes beyond.
  [[nodiscard]] bool decompress(CodecKind kind, const std::byte* from, std::size_t bytes,
                                std::byte* to, std::size_t out_bytes) noexcept;

 private:
  struct Contexts;
  const CodecKind kind_;
  const int acceleration_;
  std::unique_ptr<Contexts> contexts_;
};

}  // namespace ucm::compress
