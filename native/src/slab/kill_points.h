// Where a test may kill a process of the layout slab (IoFaults::at), in the order of one write.
#pragma once

namespace ucm::slab::point {

inline constexpr char kGroupTaken[] = "group-taken";    // slots are ours, nothing was changed
inline constexpr char kEvicted[] = "evicted";           // out of the index, still on the medium
inline constexpr char kInvalidated[] = "invalidated";   // the medium says that the slots are free
inline constexpr char kDataWritten[] = "data-written";  // an object's data are on the medium
inline constexpr char kHeaderWritten[] = "header-written";  // committed, not in the index
inline constexpr char kLinking[] = "linking";               // bucket locked, slot not in the chain
inline constexpr char kLinked[] = "linked";                 // in the chain, not yet an object
inline constexpr char kCommitted[] = "committed";           // in the index, nobody was told
inline constexpr char kFormatting[] = "formatting";         // a slab file changes its geometry
inline constexpr char kFormatted[] = "formatted";           // its header is written, not in use
inline constexpr char kPinned[] = "pinned";                 // a reader holds a slot
inline constexpr char kRemoving[] = "removing";             // bucket locked, slot out of its chain

inline constexpr const char* kAll[] = {kGroupTaken,    kEvicted,   kInvalidated, kDataWritten,
                                       kHeaderWritten, kLinking,   kLinked,      kCommitted,
                                       kFormatting,    kFormatted, kPinned,      kRemoving};

}  // namespace ucm::slab::point
