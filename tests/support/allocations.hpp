// Counts what the process allocates by operator new. Who links this has its allocation functions in
// place of the runtime's.
#pragma once

namespace flashmla::testing {

void count_allocations();
// How many there were since then, on any thread.
int stop_counting();

}  // namespace flashmla::testing
