#include "slab/scribe.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "cache/futex.h"
#include "posix/threads.h"
#include "slab/aligned.h"

namespace ucm::slab {

using namespace std::chrono_literals;

void Scribe::start() {
  thread_ = std::thread([this, keep = parts_.lock()] {
    if (keep) run(*keep);
    ended_.store(true);
  });
}

void Scribe::page(std::uint32_t group) noexcept {
  try {
    const std::lock_guard lock(mutex_);
    if (pages_.size() >= kLimit) return;
    pages_.push_back(group);
    ++asked_;
  } catch (...) {
    return;
  }
  work_.notify_one();
}

bool Scribe::flush(std::chrono::milliseconds timeout) noexcept {
  std::unique_lock lock(mutex_);
  const std::uint64_t upto = asked_;
  return progress_.wait_for(lock, timeout, [&] { return done_ >= upto || stopping_; });
}

bool Scribe::stop(Deadline deadline) noexcept {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  work_.notify_all();
  progress_.notify_all();
  return posix::join_until(thread_, ended_, deadline);
}

void Scribe::run(Parts& parts) noexcept {
  const Aligned page(kPage);
  const auto pause =
      std::clamp<std::chrono::milliseconds>(parts.core->options.lease_ttl / 4, 10ms, 5s);
  auto next_beat = Clock::now() + pause;
  std::unique_lock lock(mutex_);
  while (page.data != nullptr) {
    work_.wait_until(lock, next_beat, [&] { return stopping_ || !pages_.empty(); });
    if (stopping_ && pages_.empty()) return;
    for (std::size_t n = pages_.size(); n > 0 && !pages_.empty(); --n) {
      const std::uint32_t group = pages_.front();
      pages_.pop_front();
      const bool last = stopping_;
      lock.unlock();
      const bool written = write(parts, group, page.data);
      lock.lock();
      if (written || last) {
        ++done_;
      } else {
        pages_.push_back(group);
      }
    }
    progress_.notify_all();
    if (!pages_.empty() && !stopping_) work_.wait_for(lock, 2ms);
    if (Clock::now() < next_beat) continue;
    next_beat = Clock::now() + pause;
    lock.unlock();
    beat(parts);
    lock.lock();
  }
}

bool Scribe::write(Parts& parts, std::uint32_t group, std::byte* page) noexcept {
  Segment& s = *parts.segment;
  Group& g = s.group(group);
  while (g.dirty.load() != 0) {
    const std::uint32_t until = g.closed_until.load();
    if ((until != 0 && cache::monotonic_seconds() < until) || !parts.allocator.own(group))
      return false;
    const std::uint32_t e = s.extent_of_group(group);
    const std::uint32_t c = s.class_of_extent(e);
    if (c == kNone) {
      (void)parts.allocator.give_back(group);
      return true;
    }
    g.dirty.store(0);
    compose_page(s, group, {}, page);
    const std::uint32_t root = s.root_of(e);
    const int fd = s.files().fd(root, s.number_of(e), parts.core->roots[root]->direct());
    const std::uint64_t offset = s.geometry(c).shape.group_offset(group % s.header().group_stride);
    const ssize_t n = fd < 0 ? -1 : ::pwrite(fd, page, kPage, static_cast<off_t>(offset));
    const int error = n == static_cast<ssize_t>(kPage) ? 0 : fd < 0 ? -fd : n < 0 ? errno : EIO;
    parts.page_writes.fetch_add(1, std::memory_order_relaxed);
    if (error != 0) g.dirty.store(1);
    (void)parts.allocator.give_back(group);
    if (error != 0) {
      try {
        parts.core->errors.add("write slot heads", parts.path_of(e), error,
                               "who writes into this group next tries again");
      } catch (...) {
      }
      return true;
    }
  }
  return true;
}

void Scribe::beat(Parts& parts) noexcept {
  for (std::uint32_t r = 0; r < parts.core->roots.size(); ++r) {
    if (parts.segment->lease(r).beat()) continue;
    if ((parts.lost.fetch_or(1u << r) >> r & 1u) != 0) continue;
    for (const auto d : {posix::Direction::kRead, posix::Direction::kWrite}) {
      parts.core->roots[r]->take_out(d, ESTALE,
                                     "another host has taken the directory (layout slab)");
    }
  }
}

}  // namespace ucm::slab
