// Emulated instructions as functions of the Python module, to be tested one by one.
#pragma once

#include <nanobind/nanobind.h>

namespace onestem {

void add_instructions(nanobind::module_& m);

}  // namespace onestem
