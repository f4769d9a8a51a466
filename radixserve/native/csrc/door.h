// What all C doors have in common: nothing that is thrown passes one, it becomes a status. See check() in native/library.py.
#pragma once
#include <cstdio>
#include <exception>
#include <new>

#define RADIXSERVE_DOOR extern "C" __attribute__((visibility("default")))

namespace radixserve {

enum Status { DONE = 0, NO_MEMORY = 1, FAILED = 2 };

// of the thread's last call that FAILED
inline thread_local char failure[256] = "";

template <class Act>
int status_of(const Act& act) noexcept {
    try {
        act();
        return DONE;
    } catch (const std::bad_alloc&) {
        return NO_MEMORY;
    } catch (const std::exception& error) {
        std::snprintf(failure, sizeof failure, "%s", error.what());
    } catch (...) {
        std::snprintf(failure, sizeof failure, "unknown exception");
    }
    return FAILED;
}

}  // namespace radixserve
