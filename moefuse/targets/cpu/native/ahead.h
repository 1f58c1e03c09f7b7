// What will be read next, asked for in time.
//
// In: rows of W (unit stride within a row) and how many values of each. Out: prefetches, a few lines of 64 bytes at a
// time, in the order in which the rows lie: row after row, which memory and the hardware's own prefetching like better
// than a line of each.
#pragma once

#include <cstddef>

namespace moefuse {

constexpr int LEAD_BYTES = 8192;  // from the weights of a few tokens that are read to those that are asked for

template <class D>
class RowsAhead {
   public:
    RowsAhead(const D* from, ptrdiff_t stride, int values)
        : at_(from), lines_((values + LINE - 1) / LINE), left_(lines_), gap_(stride - ptrdiff_t(lines_) * LINE) {}
    void ask(int lines) {
        for (int i = 0; i < lines; i++) {
            __builtin_prefetch(at_, 0, 3);
            at_ += LINE;
            if (--left_ == 0) at_ += gap_, left_ = lines_;
        }
    }

   private:
    static constexpr int LINE = 64 / sizeof(D);
    const D* at_;
    int lines_, left_;
    ptrdiff_t gap_;
};

}  // namespace moefuse
