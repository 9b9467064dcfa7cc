// Looks at what a round has left on the medium, with its own reading of the file format.
#pragma once

#include "board.h"
#include "plan.h"

namespace ucm::chaos {

/// Every file under an object's name must be whole, of its key, and have its key's bytes, unless the
/// campaign damaged it. Durable objects must be there where nothing removes any. Reports to the board.
void check_files(const Plan& plan, Board& board);

/// Temporaries of whatever kind below the root.
[[nodiscard]] std::uint64_t count_temporaries(const std::string& root);

/// Flip one random bit of one random stored file. False: there is none.
bool flip_a_file(const Plan& plan, Board& board, Random& random);

/// Path of a random stored object; empty: there is none.
[[nodiscard]] std::string some_file(const Plan& plan, Random& random);

/// Move the times of temporaries and leases by up to a day, as a jump of the clock would.
void jump_clocks(const Plan& plan, Random& random);

}  // namespace ucm::chaos
