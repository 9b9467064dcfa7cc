// What all parts of one Posix stage share. Outlives every thread of the stage (they hold it).
#pragma once

#include <memory>
#include <vector>

#include "posix/counters.h"
#include "posix/format.h"
#include "posix/names.h"
#include "posix/root.h"
#include "posix/scratch.h"
#include "ucm/posix.h"

namespace ucm::posix {

class Housekeeper;
class Collector;

struct Core {
  Core(const Geometry& geometry, PosixOptions opts);
  ~Core();
  Core(const Core&) = delete;
  Core& operator=(const Core&) = delete;

  const PosixOptions options;
  Format format;
  ScratchPool scratch;  ///< for objects in other layouts
  Counters counters;
  ErrorRing errors;
  const Identity me;
  TempNames temps;
  std::vector<std::unique_ptr<Root>> roots;
  std::unique_ptr<Housekeeper> housekeeper;
  std::unique_ptr<Collector> collector;

  /// Index of the root that holds `id`: the highest of one hash per root (rendezvous), so neither the
  /// order nor the mount points of the roots matter, and a root more or less moves only its share.
  [[nodiscard]] std::size_t place(const BlockId& id) const noexcept {
    std::size_t best = 0;
    std::uint64_t best_score = 0;
    for (std::size_t i = 0; roots.size() > 1 && i < roots.size(); ++i) {
      std::uint64_t x = roots[i]->id().word() ^ id.word();
      x = (x ^ (x >> 33)) * 0xff51afd7ed558ccdULL;
      x = (x ^ (x >> 33)) * 0xc4ceb9fe1a85ec53ULL;
      x ^= x >> 33;
      if (x >= best_score) {
        best_score = x;
        best = i;
      }
    }
    return best;
  }
};

}  // namespace ucm::posix
