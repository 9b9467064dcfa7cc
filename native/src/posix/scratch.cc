#include "posix/scratch.h"

#include <algorithm>
#include <cstdlib>

#include "ucm/geometry.h"
#include "ucm/keep.h"

namespace ucm::posix {

ScratchPool::ScratchPool(std::uint64_t object_bytes) {
  const auto fit = static_cast<std::size_t>(kBytes / std::max<std::uint64_t>(object_bytes, 1));
  const std::size_t count = std::clamp<std::size_t>(fit, 2, kMaxBuffers);
  for (std::size_t i = 0; i < count; ++i) buffers_.push_back(std::make_unique<Buffer>());
}

ScratchPool::~ScratchPool() {
  for (auto& b : buffers_) {
    if (b->state == Buffer::State::kLost) keep_forever(std::shared_ptr<Buffer>(std::move(b)));
  }
}

ScratchPool::Claim ScratchPool::claim(const FileVersion& file, std::uint64_t bytes, ReadItem& item,
                                      Buffer*& buffer) noexcept {
  using State = Buffer::State;
  std::scoped_lock lock(mutex_);
  Buffer* free = nullptr;
  for (auto& b : buffers_) {
    const bool in_use = b->state == State::kReading || b->state == State::kVerified;
    if (in_use && b->file == file) {
      b->last_use = ++clock_;
      if (b->state == State::kVerified) {
        ++b->holders;
        buffer = b.get();
        return Claim::kVerified;
      }
      try {
        b->waiting.push_back(std::move(item));
      } catch (...) {
        return Claim::kNoMemory;
      }
      return Claim::kJoined;
    }
    if (b->state == State::kReading || b->state == State::kLost || b->holders > 0) continue;
    if (free == nullptr || b->last_use < free->last_use) free = b.get();
  }
  if (free == nullptr) return Claim::kNoBuffer;
  if (free->bytes < bytes) {
    free->state = State::kEmpty;
    free->memory.reset(static_cast<std::byte*>(std::aligned_alloc(kIoAlign, bytes)));
    free->bytes = free->memory ? bytes : 0;
    free->data = free->memory.get();
    if (!free->memory) return Claim::kNoMemory;
  }
  free->file = file;
  free->last_use = ++clock_;
  free->state = State::kReading;
  buffer = free;
  return Claim::kOwner;
}

std::vector<ReadItem> ScratchPool::finish(Buffer& buffer) noexcept {
  std::scoped_lock lock(mutex_);
  std::vector<ReadItem> out;
  out.swap(buffer.waiting);
  if (out.empty()) buffer.state = Buffer::State::kVerified;
  return out;
}

std::vector<ReadItem> ScratchPool::fail(Buffer& buffer) noexcept {
  std::scoped_lock lock(mutex_);
  std::vector<ReadItem> out;
  out.swap(buffer.waiting);
  buffer.state = Buffer::State::kEmpty;
  return out;
}

void ScratchPool::let_go(Buffer& buffer) noexcept {
  std::scoped_lock lock(mutex_);
  --buffer.holders;
}

void ScratchPool::lose(Buffer& buffer) noexcept {
  std::scoped_lock lock(mutex_);
  buffer.state = Buffer::State::kLost;
}

}  // namespace ucm::posix
