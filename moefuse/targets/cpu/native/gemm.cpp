// gemm.h for the library's dtype, apart from run.cpp: they are built side by side.
#include "gemm.h"

namespace moefuse {

template void multiply(const View<MOEFUSE_TYPE>&, int, const Tokens<MOEFUSE_TYPE>&, int64_t, float*, ptrdiff_t,
                       const MOEFUSE_TYPE*);
template void pack_rows(Tokens<MOEFUSE_TYPE>&, int64_t);

}  // namespace moefuse
