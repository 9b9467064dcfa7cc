// Shared by the tests of the layout slab: options, raw access to slab files, killed children.
#pragma once

#include <fcntl.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "posix_kit.h"
#include "slab/format.h"
#include "slab/kill_points.h"

namespace ucm::slab_test {

using namespace posix_test;
using slab::SlabHead;
using slab::SlabShape;
using slab::SlotHead;

inline PosixOptions slab_options(const std::vector<std::string>& roots,
                                 std::uint64_t capacity = 4u << 20) {
  PosixOptions o = options_for(roots);
  o.layout = "slab";
  o.gc.capacity_bytes = capacity;
  o.quarantine = milliseconds(0);
  return o;
}

/// Calls a function at every kill point.
class Points : public IoFaults {
 public:
  explicit Points(std::function<void(const std::string&)> at) : at_(std::move(at)) {}
  int before(IoStep, const char*, std::size_t&) noexcept override { return 0; }
  void at(const char* point) noexcept override { at_(point); }

 private:
  std::function<void(const std::string&)> at_;
};

/// A slab file read from the medium, beside all stages.
struct RawSlab {
  fs::path path;
  SlabHead head{};
  SlabShape shape;
  std::vector<SlotHead> slots;  ///< empty when the file has no geometry yet

  explicit RawSlab(const fs::path& file) : path(file) {
    const int fd = ::open(path.c_str(), O_RDONLY);
    if (fd < 0) return;
    if (pread(fd, &head, sizeof head, 0) == sizeof head && sound(head)) {
      shape.slot_bytes = head.slot_bytes;
      shape.slots = head.slots;
      shape.group_slots = head.group_slots;
      shape.head_bytes = align_up(sizeof head + head.layout_bytes, kIoAlign);
      shape.groups = (head.slots + head.group_slots - 1) / head.group_slots;
      shape.data_offset = shape.head_bytes + std::uint64_t{shape.groups} * kIoAlign;
      for (std::uint32_t i = 0; i < head.slots; ++i) {
        SlotHead h{};
        (void)!pread(fd, static_cast<void*>(&h), sizeof h, static_cast<off_t>(head_offset(i)));
        slots.push_back(h);
      }
    }
    ::close(fd);
  }
  [[nodiscard]] std::uint64_t head_offset(std::uint32_t slot) const {
    return shape.group_offset(slot / shape.group_slots) +
           slot % shape.group_slots * sizeof(SlotHead);
  }
  [[nodiscard]] bool holds(std::uint32_t slot, const BlockId& id) const {
    return sound(slots[slot]) && slots[slot].epoch == head.epoch && slots[slot].id == id;
  }
};

inline std::vector<RawSlab> raw_slabs(const fs::path& root) {
  std::vector<RawSlab> out;
  for (const auto& entry : fs::directory_iterator(root / "ns-test")) {
    if (entry.path().filename().string().starts_with("slab-")) out.emplace_back(entry.path());
  }
  return out;
}

struct Place {
  fs::path file;
  std::uint64_t head = 0;  ///< offset of the slot's head
  std::uint64_t slot = 0;  ///< offset of the slot
  bool found = false;
};

/// Where the medium says that the object is.
inline Place place_of(const fs::path& root, const BlockId& id) {
  for (const auto& slab : raw_slabs(root)) {
    for (std::uint32_t i = 0; i < slab.slots.size(); ++i) {
      if (slab.holds(i, id))
        return {slab.path, slab.head_offset(i), slab.shape.slot_offset(i), true};
    }
  }
  return {};
}

/// Runs `body` in a child; its return value is the exit status.
inline pid_t child(const std::function<int()>& body) {
  const pid_t pid = fork();
  if (pid == 0) {
    int status = 120;
    try {
      status = body();
    } catch (const std::exception& e) {
      std::fprintf(stderr, "child: %s\n", e.what());
    }
    _exit(status);
  }
  return pid;
}

/// Exit status, or minus the signal.
inline int end_of(pid_t pid) {
  int status = -1;
  EXPECT_EQ(waitpid(pid, &status, 0), pid);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
}

/// Writes the objects [first, last) at once; how many were stored.
inline std::size_t write_range(Harness& h, int first, int last) {
  const auto n = static_cast<std::size_t>(last - first);
  std::vector<std::unique_ptr<Region>> from;
  std::vector<WriteOp> ops;
  for (int i = first; i < last; ++i) {
    from.push_back(std::make_unique<Region>(h.geometry, id_of(i)));
    ops.push_back({id_of(i), from.back()->data(), ops.size()});
  }
  auto results = std::make_shared<Results>(n);
  h.stage->write(ops, results, in(milliseconds(20'000)));
  EXPECT_TRUE(results->wait());
  return results->count(Status::kOk);
}

/// Reads every object of [first, last) that lookup calls present. Returns how many loaded; wrong bytes
/// and anything but hit, miss or corrupt fail the test.
inline int load_range(Harness& h, int first, int last, int* corrupt = nullptr) {
  int whole = 0;
  for (int i = first; i < last; ++i) {
    const bool present = h.present(id_of(i));
    const Outcome o = h.read(id_of(i));
    EXPECT_TRUE(o.status == Status::kOk || o.status == Status::kMiss ||
                (corrupt != nullptr && o.status == Status::kCorrupt))
        << i << " status " << static_cast<int>(o.status);
    if (o.status == Status::kCorrupt && corrupt != nullptr) ++*corrupt;
    if (o.status == Status::kOk) {
      EXPECT_TRUE(present);
      ++whole;
    }
  }
  return whole;
}

}  // namespace ucm::slab_test
