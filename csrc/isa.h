// Which instruction sets were compiled, and which of them this machine has.
#pragma once

#include <string>
#include <vector>

#include "attention.h"

namespace onestem {

// Names of the compiled instruction sets, the best first.
std::vector<std::string> compiled_isas();

// Whether this machine can run code for a compiled instruction set.
bool has_isa(const std::string& name);

// The functions for an instruction set; null where it is not compiled or the machine lacks it.
const Kernels* kernels_for(const std::string& name);

}  // namespace onestem
