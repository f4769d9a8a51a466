// Memory of a decoder, and of its attention, for what lives no longer than a step.
#pragma once
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>

namespace radixserve {

// memory that only grows: fresh pages from the operating system cost more than what is written to them
template <class T>
class Scratch {
public:
    T* of(int64_t count) {  // throws std::bad_alloc
        if (count > size_) {
            memory_.reset(static_cast<T*>(std::aligned_alloc(64, (count * sizeof(T) + 63) / 64 * 64)));
            size_ = memory_ ? count : 0;
            if (memory_ == nullptr) throw std::bad_alloc();
        }
        return memory_.get();
    }
    T* data() const { return memory_.get(); }  // what of() gave last

private:
    struct Free {
        void operator()(T* at) const { std::free(at); }
    };
    std::unique_ptr<T, Free> memory_;
    int64_t size_ = 0;
};

}  // namespace radixserve
