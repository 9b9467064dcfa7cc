#include "slab/parts.h"

#include "slab/scribe.h"

namespace ucm::slab {

Parts::Parts(std::shared_ptr<posix::Core> c, std::shared_ptr<Segment> s)
    : core(std::move(c)),
      segment(std::move(s)),
      index(segment, core->format, segment->join_class(core->format)),
      allocator(index, *core) {
  segment->set_faults(core->options.faults);
}

Parts::~Parts() = default;

}  // namespace ucm::slab
